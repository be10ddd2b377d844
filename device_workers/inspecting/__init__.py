"""What a worker process does for the commands that look at the machine, a file per command."""
