"""What every stage runs on: files, devices, progress, interruptions, bounds."""
