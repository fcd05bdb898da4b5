"""Lightning callbacks: they read and report."""
