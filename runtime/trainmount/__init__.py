"""What a training program in a Trainmount pod imports.

- `trainmount.data`: the dataset, the loader and the checkpoint storage (needs torch).
- `trainmount.checkpoint`: `Checkpointer`, which saves and resumes a whole job (needs torch).
- `trainmount.run`: this process's place in the job, the job's parameters, a sign of life.

Nothing is imported here, so that `import trainmount` costs nothing.
"""

from __future__ import annotations

__all__: list[str] = []
