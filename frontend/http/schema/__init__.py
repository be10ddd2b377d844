"""What goes over HTTP, one file per API family; the source of /openapi.json."""
