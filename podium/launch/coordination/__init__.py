"""The coordinator of a run and its parts: members, deadlines, losses, generations, scaling, replacements."""
