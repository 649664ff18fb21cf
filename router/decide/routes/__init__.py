"""The route table as this router uses it: accepted, indexed, remembered."""
