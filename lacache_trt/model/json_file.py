"""The small JSON files of a checkpoint; links were resolved and checked before."""

from __future__ import annotations

from functools import partial

from lacache_trt import strict_json
from lacache_trt.errors import CheckpointError

read_bounded = partial(strict_json.read_bounded, failure=CheckpointError, follow_link=True)
read_json_object = partial(strict_json.read_object, failure=CheckpointError, follow_link=True)
parse_json_object = partial(strict_json.parse_object, failure=CheckpointError)
