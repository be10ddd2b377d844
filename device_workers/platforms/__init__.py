"""One module per vendor family; the only place that touches vendor APIs."""
