"""A reward by which the random models of tests learn: about half of all token ids are even."""


def even(completion_ids, **_):
    return [sum(t % 2 == 0 for t in ids) / len(ids) for ids in completion_ids]
