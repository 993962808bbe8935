"""One rank of a run. Never imports the launcher; gets a plan file and torch's environment,
leaves files in the run folder."""
