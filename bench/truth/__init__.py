"""Coverage of stated intervals: for every measure, data, state and path, how often the true value is inside."""
