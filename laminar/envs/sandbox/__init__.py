"""Runs Python that a model wrote where it can reach nothing: no network, files, environment or other processes.

    Sandbox.run(code) ─► pool ─► slot ─► zygote, confined from outside (bubblewrap) or by nobody yet
                                           └─ fork ─► child: confines itself, waits for code, runs it, is gone

A child serves one call. It is forked ahead, so that a call pays for neither an interpreter nor a namespace. Everything
here but `build` needs the standard library alone, so that it can be tried as another user, by another interpreter.
"""
