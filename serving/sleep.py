"""A server that shares its GPU with the trainer (--colocate) sleeps while that one needs it.

    GET  /sleep           {"state": "awake" | "asleep" | "in transition" | "in a push" | "half awake"}, at any moment;
                          half awake: a push that broke off woke the weights, and not the KV cache
    POST /sleep?level=2   ends what is under way, and drops KV cache and weights (level 1: keeps them in host memory)
    POST /wake_up         takes the memory back; after level 2 there is nothing in it

A push wakes a sleeping server by itself: weights first, the KV cache when they are complete, so that both need never
lie beside what the trainer still holds. Until then everything that samples is answered with 503, as after a push that
broke off: what woke without weights is of no policy. Memory is vLLM's matter (`LLM.sleep`, CuMemAllocator).
"""

import asyncio

from fastapi import APIRouter

from serving.gate import failure

TAGS = ["weights", "kv_cache"]  # of vLLM's memory pools, in the order in which they are needed


class Sleep:
    """Which memory is given back, and why nothing can be sampled meanwhile."""

    def __init__(self, engine):
        self.engine = engine
        self.asleep: list[str] = []  # of TAGS
        self.moving = False

    def state(self, pushes) -> str:
        if self.moving:
            return "in transition"
        if pushes.active:
            return "in a push"
        return "asleep" if self.asleep == TAGS else "half awake" if self.asleep else "awake"

    async def fall_asleep(self, level: int) -> None:
        # vLLM keeps a copy of the model's buffers, which must have memory again after a push that broke off.
        await self.engine.collective_rpc("abort_weight_update")
        await self.engine.sleep(level=level, mode="abort")
        self.asleep = list(TAGS)

    async def wake(self, tags: list[str]) -> None:
        """Those of `tags` that are asleep. vLLM goes on sampling when all are awake."""
        for tag in [tag for tag in tags if tag in self.asleep]:
            await self.engine.wake_up(tags=[tag])
            self.asleep.remove(tag)


def sleep_routes(engine, pushes, sleep: Sleep) -> APIRouter:
    router = APIRouter()

    @router.get("/sleep")
    async def state():
        return {"state": sleep.state(pushes)}

    async def change(what: str, wanted: str, act):
        """`act` under the lock of pushes, unless the state is `wanted` already."""
        if (now := sleep.state(pushes)) in BUSY:
            return failure(503, f"{what}: {BUSY[now]} (state: {now}); ask again when GET /sleep says another", 5)
        if not engine.model_config.enable_sleep_mode:
            return failure(400, f"{what}: start the server with --enable-sleep-mode")
        if now == wanted:
            return {"state": now}
        sleep.moving = True  # nothing was awaited since the state was looked at
        try:
            async with pushes.lock:
                if pushes.active:
                    return failure(503, f"{what}: {BUSY['in a push']}", 5)
                await asyncio.wait_for(act(), pushes.timeout)
        except Exception as error:  # also of vLLM's: the engine may hold anything now
            reason = f"took over {pushes.timeout:g} s" if isinstance(error, TimeoutError) else f"failed ({error})"
            pushes.broken = f"{what} {reason}; start this server anew"
            return failure(503, pushes.broken)
        finally:
            sleep.moving = False
        return {"state": sleep.state(pushes)}

    @router.post("/sleep")
    async def fall_asleep(level: int = 2):
        if level not in (1, 2):
            return failure(400, f"level={level}: 1 keeps the weights in host memory, 2 drops them")

        async def act():
            pushes.broken = pushes.broken or SLEEPS[level]
            await sleep.fall_asleep(level)

        return await change("POST /sleep", "asleep", act)

    @router.post("/wake_up")
    async def wake_up():
        async def act():
            await sleep.wake(TAGS)
            if pushes.broken in SLEEPS.values():
                pushes.broken = None if pushes.broken == SLEEPS[1] else WOKE_EMPTY

        return await change("POST /wake_up", "awake", act)

    return router


BUSY = {"in transition": "the server is falling asleep or waking up", "in a push": "a weight push is under way"}
SLEEPS = {
    1: "the server sleeps; POST /wake_up wakes it",
    2: "the server sleeps and its weights are dropped; a push of all weights wakes it",
}
WOKE_EMPTY = "the server woke without weights, which were dropped when it fell asleep; push all weights"
