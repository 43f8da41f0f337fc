"""What people see while something goes on: consoles, a bar, a run as it happens. Commands and Python share it."""
