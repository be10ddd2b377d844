"""One step: rows, batch, model run, sampling."""
