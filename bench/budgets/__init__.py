"""TR 16-003's trade-offs, re-drawn: error and staleness budgets against the offline optimum and the baselines."""
