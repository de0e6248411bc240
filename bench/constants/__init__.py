"""What the value of a tuned constant changes: scenarios in virtual time, with other values of the constant."""
