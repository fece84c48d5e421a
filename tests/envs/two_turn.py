"""A fake environment with two turns: the first is answered with a number to add, the second ends the trajectory."""

from laminar.envs.env import Environment, Turn


class TwoTurn(Environment):
    turn_ends = ("</code>",)

    def observe(self, turn: Turn) -> str | None:
        if turn.num_turns == 1:
            return f"<output>{turn.extra_info['tool_output']}</output>"
        return None


class AsyncTwoTurn(Environment):
    async def observe(self, turn: Turn) -> str | None:
        return TwoTurn().observe(turn)
