"""What one center takes, and how soon it answers again when its driver dies: real gateway, job, API and database."""
