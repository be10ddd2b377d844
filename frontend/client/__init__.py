"""The engine as seen by a frontend: the client actor, one request's mailbox, the offline API."""
