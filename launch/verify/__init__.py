"""`python -m launch verify`: proofs, on a configuration of the user's own, that nothing is lost and nothing depends on
the number of processes. Everything runs through the real command line."""
