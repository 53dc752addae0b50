"""How many files, and with them connections, a process may have open."""

import contextlib
import errno
import resource

OPEN_FILES = 65536


def allow_many() -> None:
    """The soft limit is often 1,024, and every request that is under way, of which a step has thousands, is a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # macOS allows fewer than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def used_up(error: BaseException | None) -> bool:
    """Whether this process, or its machine, had no more of them: what it raised, or what that came from."""
    while error is not None and getattr(error, "errno", None) not in (errno.EMFILE, errno.ENFILE):
        error = error.__cause__ or error.__context__
    return error is not None


def limit() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
