"""tiny-llada on the CUDA engine: exact against none, accuracy, and the tokens for a comparison.

python3 benchmarks/run_from_checkout.py benchmarks/tiny_agreement.py BUNDLE
"""

import json
import os
import sys
import tempfile
from pathlib import Path

from lacache_trt import GenerationConfig, Runtime
from lacache_trt.demo.problems import is_correct, problem
from lacache_trt.engines.builder import build_engine
from lacache_trt.engines.options import BuildOptions

PROBLEMS = 64
out = Path(os.environ.get("OUT", "."))
problems = [problem("held-out", index) for index in range(PROBLEMS)]
with tempfile.TemporaryDirectory() as folder:
    engine = Path(folder) / "engine"
    build_engine(Path(sys.argv[1]), engine, BuildOptions(engine="cuda"))
    answers = {}
    with Runtime.load(engine) as runtime:
        for cache in ("exact", "none"):
            config = GenerationConfig(gen_length=64, block_length=32, steps=64, cache=cache)
            answers[cache] = runtime.generate([each.question for each in problems], config)
equal = sum(a.tokens == b.tokens for a, b in zip(answers["exact"], answers["none"], strict=True))
right = sum(is_correct(p, a.text or "") for p, a in zip(problems, answers["exact"], strict=True))
print(f"{equal} of {PROBLEMS} generations equal, {right} answers right")
(out / "tiny_tokens.json").write_text(json.dumps([list(a.tokens) for a in answers["exact"]]))
