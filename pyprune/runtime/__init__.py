"""The ground of every stage: files, devices, progress, interruptions, bounds."""
