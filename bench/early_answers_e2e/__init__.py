"""Early answers of real processes: latency, coverage and cost, compared with answers that wait for stragglers."""
