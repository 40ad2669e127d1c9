"""Plans a sweep, runs its trials on Ray, and records what each one measured."""

__all__: list[str] = []
