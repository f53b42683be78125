"""The operator of TrainingJobs. Public for the command line: `spec`, `environment`, `labels`,
`accelerators`.
"""
