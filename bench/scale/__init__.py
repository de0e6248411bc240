"""What a center and an edge take, and how soon answers come again when a driver dies: real processes and databases."""
