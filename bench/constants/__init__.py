"""What the value of a tuned constant changes: scenarios in virtual time, with the constant halved, as it is, and doubled."""
