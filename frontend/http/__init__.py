"""The HTTP surface: app, routes per API family, schema structs, event streams, access."""
