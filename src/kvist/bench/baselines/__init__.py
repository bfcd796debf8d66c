"""What a user would pick instead of Kvist, made to run where the benchmark runs."""
