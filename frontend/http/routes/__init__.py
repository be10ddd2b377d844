"""The handlers, one file per API family."""
