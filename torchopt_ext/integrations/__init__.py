"""One module for each outside project and generation; none is imported unless it is asked for."""
