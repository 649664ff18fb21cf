"""The engine's main loop: one step after another on one thread, results handed to the event loop.

Entry points: `step.EngineCore` is the step, `generation_thread.GenerationThread` runs it.
"""
