"""Early answers of real processes: latency, coverage and cost against answers that wait for stragglers."""
