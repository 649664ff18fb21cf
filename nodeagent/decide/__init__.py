"""Pure decisions of one node about its replicas, requests and artifacts."""
