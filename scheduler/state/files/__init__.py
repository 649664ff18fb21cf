"""The contents of uploaded files: in a folder or a bucket."""
