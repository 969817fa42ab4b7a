"""One vLLM engine: prompts in, sampled tokens with their log-probabilities out, weights replaced between steps.

`RolloutEngine` is a plain class: it runs in the caller's process, or as a Ray actor (`ray.remote(RolloutEngine)`).
Its workers are spawned processes, so a script that builds one needs an `if __name__ == "__main__":` guard.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moerl.models import params_of, read_arch
from moerl.models.files import DTYPE_NAMES, header, raw
from moerl.models.tensormap import hf_shapes
from moerl.reshard.names import layer_order
from moerl.reshard.receiver import Connection, Header, checkpoint_header
from moerl.reshard.trace import Trace

if TYPE_CHECKING:
    import torch

    from moerl.models.arch import Arch

SHARED_MEMORY = Path("/dev/shm")
MIN_TEMPERATURE = 0.01  # vLLM silently raises a lower one to this


@dataclass(frozen=True)
class Completion:
    """One sampled continuation.

    `token_ids` ends with the stop token when `finish_reason` is "stop"; "length" means `max_tokens` were sampled, "abort" that new
    weights came first. `logprobs[t]` is the natural-log probability of `token_ids[t]` with the temperature applied (greedy: temperature 1).
    `version` names the weights that sampled its first token, `last_version` those that sampled its last.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    version: int
    last_version: int


def cpu_binding(tp: int, cpus: list[int]) -> str:
    """CPUs of each of `tp` workers in vLLM's notation ("0,1|2,3"). With fewer CPUs than workers they are shared."""
    if tp > len(cpus):
        return "|".join(str(cpus[rank % len(cpus)]) for rank in range(tp))
    each = len(cpus) // tp
    return "|".join(",".join(map(str, cpus[rank * each : (rank + 1) * each])) for rank in range(tp))


def sample_seed(seed: int, sample: int) -> int:
    """Seed of one sample of a prompt: a hash of both numbers, so that no two (seed, sample) pairs run in step."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{sample}".encode()).digest()[:8], "little") >> 1


def write_safetensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write tensors (any device and stride) as one safetensors file, layer by layer, one tensor in memory at a time.

    Raises ValueError for a dtype the format lacks, and OSError naming both sizes when the file would not fit.
    """
    names = sorted(tensors, key=layer_order)
    for name in names:
        if tensors[name].dtype not in DTYPE_NAMES:
            raise ValueError(f"tensor {name} has dtype {tensors[name].dtype}, which safetensors cannot hold")
    head, _ = header({name: (tensors[name].dtype, tuple(tensors[name].shape)) for name in names})
    need = len(head) + sum(tensor.nbytes for tensor in tensors.values())
    free = shutil.disk_usage(path.parent).free
    if need > free:
        sizes = f"{need / 2**30:.2f} GiB in {path.parent}, which has {free / 2**30:.2f} GiB free"
        raise OSError(f"weights need {sizes}: enlarge it (in a container: --shm-size)")
    with open(path, "wb") as file:
        file.write(head)
        for name in names:
            file.write(raw(tensors[name]))


def unservable(arch: Arch) -> str:
    """What vLLM would do otherwise than the model, or nothing: two facts of gpt-oss are in its code and not read from config.json."""
    if arch.family != "gpt_oss":
        return ""
    if arch.swiglu_limit != 7.0:
        return f"vLLM runs gpt_oss with swiglu_limit 7.0, whatever it is (here {arch.swiglu_limit})"
    if arch.window_layers != frozenset(range(0, arch.layers, 2)):
        return "vLLM runs gpt_oss with a window in layers 0, 2, 4 and so on, whatever layer_types says"
    return ""


def needed_header(model: str, empty: bool = False) -> Header:
    """Names and shapes of a whole set of weights as a sync brings it: in the tensor map's spelling, whatever the start checkpoint's.

    vLLM's model has no prediction layers: their tensors are not among them.
    The dtype is the checkpoint's where it has a tensor of that name, else any float. An `empty` checkpoint has none.
    """
    stored = {} if empty else checkpoint_header(model)
    shapes = hf_shapes(params_of(read_arch(model).main()).values())
    return {name: (shape, stored[name][1] if name in stored else "BF16") for name, shape in shapes.items()}


class RolloutEngine:
    """A vLLM engine over `tp` workers that serves one known version of the weights at a time.

    Args:
        model: local Hugging Face checkpoint directory (config and safetensors).
        empty: there is no weight in the directory; the engine refuses to generate until the first load.
        tp: tensor-parallel size; the workers are processes of this host.
        max_model_len: most tokens of a prompt and its completion together.
        device: "cpu" or "cuda", whichever the installed vLLM was built for.
        kv_cache_gib: key-value cache of each worker on the CPU, GiB.
        gpu_memory_utilization: share of each GPU that vLLM may fill, weights included.
        enforce_eager: run without CUDA graphs or compilation.
        seed: for samples drawn without a seed of their own.
        cpu_bind: CPUs of each worker in vLLM's notation; by default this process's CPUs shared out.
        expert_parallel: every worker holds whole experts, its share of them, instead of a share of every expert.
        sleep: weights and cache can leave the GPU between uses (`sleep`).
        in_flight: what becomes of requests that are running when new weights come: "wait" until they are finished, "abort" them with what
        they
            have, or "keep" them, which go on with the new weights (their keys and values are computed anew).

    `generate` may run in one thread while another one brings new weights.
    """

    worker_extension = "moerl.reshard.receiver.WeightReceiver"

    def __init__(
        self,
        model: str,
        *,
        empty: bool = False,
        tp: int = 1,
        dtype: str = "bfloat16",
        max_model_len: int,
        device: str,
        kv_cache_gib: float = 1.0,
        gpu_memory_utilization: float = 0.85,
        enforce_eager: bool,
        max_num_seqs: int = 256,
        seed: int = 0,
        cpu_bind: str | None = None,
        expert_parallel: bool = False,
        sleep: bool = False,
        in_flight: str = "wait",
    ) -> None:
        if device not in ("cpu", "cuda"):
            raise ValueError(f'device is {device!r}, must be "cpu" or "cuda"')
        if not Path(model, "config.json").is_file():
            raise ValueError(f"model {model} must be a local Hugging Face checkpoint directory, with a config.json")
        self._needed = needed_header(model, empty)
        self._version: int | None = None
        self._unfit = _EMPTY if empty else ""  # why the weights cannot be served, whatever their version
        self._max_model_len = max_model_len
        self._in_flight = in_flight
        self._turn = threading.Condition()  # of whoever uses the engine: a step of `generate`, or a sync
        self._paused = self._asleep = False
        self._pending: dict[str, tuple[int, int, int]] = {}  # running requests: prompt, sample, version at the start
        _set_environment(device, enforce_eager, cpu_bind or cpu_binding(tp, sorted(os.sched_getaffinity(0))))

        from vllm import EngineArgs, LLMEngine
        from vllm.platforms import current_platform

        if current_platform.device_type != device:
            raise ValueError(f"device is {device!r}, but this vLLM runs on {current_platform.device_type!r}")
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=model,
                load_format="dummy" if empty else "auto",
                tensor_parallel_size=tp,
                enable_expert_parallel=expert_parallel,
                enable_sleep_mode=sleep,
                dtype=dtype,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                seed=seed,
                enforce_eager=enforce_eager,
                # vLLM rewinds the generator of a half-prefilled seeded request, which CPU generators cannot do
                enable_chunked_prefill=device != "cpu",
                max_num_batched_tokens=max(8192, max_model_len) if device == "cpu" else None,
                gpu_memory_utilization=gpu_memory_utilization,
                kv_cache_memory_bytes=int(kv_cache_gib * 2**30) if device == "cpu" else None,
                distributed_executor_backend="mp" if device == "cpu" or tp > 1 else "uni",
                worker_extension_cls=self.worker_extension,
                logprobs_mode="processed_logprobs",  # of the distribution sampled from: the temperature is in them
                generation_config="vllm",  # nothing from the checkpoint's generation_config.json
                skip_tokenizer_init=True,
                disable_log_stats=True,
                use_tqdm_on_load=False,
            )
        )
        self._vocab_size = self._engine.model_config.get_vocab_size()

    @property
    def version(self) -> int | None:
        """Version of the weights being served; None while there are none to vouch for."""
        return self._version

    def mark_loaded(self, version: int) -> None:
        """Declare that the checkpoint the engine was started from is version `version`."""
        if self._unfit:
            raise RuntimeError(self._unfit)
        self._version = version

    def generate(
        self,
        prompts: list[list[int]],
        *,
        n: int,
        temperature: float,
        max_tokens: int,
        stop_token_ids: list[int],
        seeds: list[int] | None,
    ) -> list[list[Completion]]:
        """Sample `n` completions of every prompt from the full vocabulary; result[i][j] is sample j of prompt i.

        `temperature` 0 means greedy. `seeds` holds one seed a prompt; the random stream of sample j depends on
        (seeds[i], j) alone, not on the rest of the batch. Only `stop_token_ids` and `max_tokens` end a completion.

        Raises RuntimeError when no version of the weights is loaded, ValueError for a request vLLM cannot serve.
        """
        self._check_request(prompts, temperature, max_tokens, seeds)
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        version = self._wait_turn()
        results: list[list[Any]] = [[None] * n for _ in prompts]
        try:
            with self._turn:
                for i, j in ((i, j) for i in range(len(prompts)) for j in range(n)):
                    params = SamplingParams(
                        temperature=temperature,
                        max_tokens=max_tokens,
                        stop_token_ids=stop_token_ids,
                        seed=None if seeds is None else sample_seed(seeds[i], j),
                        ignore_eos=True,  # stop_token_ids alone decide
                        logprobs=0,  # of the sampled token only
                        flat_logprobs=True,
                        detokenize=False,
                        output_kind=RequestOutputKind.CUMULATIVE if self._in_flight == "abort" else RequestOutputKind.FINAL_ONLY,
                    )
                    self._engine.add_request(f"{i}/{j}", {"type": "token", "prompt_token_ids": prompts[i]}, params)
                    self._pending[f"{i}/{j}"] = i, j, self._version
            while self._pending:
                self._wait_turn()
                with self._turn:
                    self._step(results)
        finally:
            with self._turn:
                self._abort()
                self._turn.notify_all()
        nothing = Completion([], [], "abort", version, version)  # aborted before its first token
        return [[completion or nothing for completion in row] for row in results]

    def _wait_turn(self) -> int:
        """Wait until no sync is under way: the version of the weights after it. RuntimeError where there are none."""
        with self._turn:
            self._turn.wait_for(lambda: not self._paused)
            if self._version is None:
                raise RuntimeError(self._unfit or _NO_VERSION)
            return self._version

    def _step(self, results: list[list[Any]]) -> None:
        """One step of the engine, unless a sync took the turn. Finished completions go to their places, with `abort` unfinished ones
        too.
        """
        if self._paused or not self._pending:
            return
        for output in self._engine.step():
            i, j, version = self._pending[output.request_id]
            results[i][j] = self._completion(output.outputs[0], version, output.finished)
            if output.finished:
                del self._pending[output.request_id]

    def _abort(self) -> None:
        if self._pending:
            self._engine.abort_request(list(self._pending))
            self._pending.clear()

    def load_weights(self, tensors: dict[str, torch.Tensor], version: int) -> float:
        """Replace all weights by `tensors` (Hugging Face names, full tensors) and serve them as `version`.

        All or nothing: names, shapes and dtypes are checked on every worker before any weight is touched. While it
        runs, /dev/shm holds the whole model. Returns the seconds it took.

        Raises ValueError when the tensors do not fit the model, OSError when /dev/shm lacks room: the old version still
        serves. Raises RuntimeError when a worker fails half-way: `version` is None until a load succeeds.
        """
        start = time.perf_counter()
        path = SHARED_MEMORY / f"moerl-weights-{os.getpid()}-{uuid.uuid4().hex}.safetensors"
        try:
            write_safetensors(path, tensors)
            self._call(ValueError, "moerl_check_weights", str(path), self._needed)
            self._replace("moerl_load_weights", str(path))
        finally:
            path.unlink(missing_ok=True)
        self.commit(version)
        return time.perf_counter() - start

    def trace(self, shapes: dict[str, tuple[int, ...]], layers: int) -> list[Trace]:
        """What each worker loads of the model cut to its first `layers` layers, whose Hugging Face tensors have these shapes."""
        return self._call(RuntimeError, "moerl_trace", shapes, layers)

    def connect(self, connection: Connection) -> None:
        """Take part in the syncs of a plan."""
        self._call(RuntimeError, "moerl_connect", connection)

    def receive(self) -> dict[str, float]:
        """Take in the weights that the training ranks send now, up to `commit`.

        Seconds it took, `wake_s` of them to wake up, and the most of its workers of what `moerl_receive` answers.

        Raises RuntimeError when a worker fails: there are no weights to serve until a whole sync or load succeeds.
        """
        start = time.perf_counter()
        answers, wake_s = self._replace("moerl_receive")
        most = {key: max(answer[key] for answer in answers) for key in answers[0]}
        return {"seconds": time.perf_counter() - start, "wake_s": wake_s} | most

    def commit(self, version: int) -> None:
        """Serve what has been received as `version`."""
        with self._turn:
            if not self._paused:
                raise RuntimeError("nothing was received that could be committed")
            self._version, self._unfit, self._paused = version, "", False
            self._turn.notify_all()

    def give_up(self) -> None:
        """End a sync without a version: somebody else failed."""
        with self._turn:
            self._paused = False
            self._turn.notify_all()

    def sleep(self) -> None:
        """Give the GPU's memory back, weights and cache; the next sync brings both."""
        with self._turn:
            self._version, self._unfit, self._asleep = None, _ASLEEP, True
            self._engine.sleep(level=2)

    def _replace(self, method: str, *args: Any) -> tuple[list[Any], float]:
        """Call a method that replaces the weights, with what is running dealt with and the engine awake, and with no cache afterwards.

        The answers of the workers, and the seconds it took to wake them.
        """
        with self._turn:
            if self._in_flight == "wait":
                self._turn.wait_for(lambda: not self._pending)
            if self._in_flight == "abort":
                self._abort()
            self._version, self._unfit, self._paused = None, _INCOMPLETE, True
            try:
                wake_s = self._wake("weights") if self._asleep else 0.0
                answers = self._call(RuntimeError, method, *args)
                if self._asleep:  # the cache comes when the weights are there
                    wake_s += self._wake("kv_cache")
                    self._asleep = False
                # Its keys and values belong to the old weights, and so do those of requests that go on.
                if not self._engine.reset_prefix_cache(reset_running_requests=bool(self._pending)):
                    raise RuntimeError("vLLM did not reset its prefix cache: requests are still running")
            except BaseException:
                self.give_up()
                raise
        return answers, wake_s

    def _wake(self, what: str) -> float:
        start = time.perf_counter()
        self._engine.wake_up(tags=[what])
        return time.perf_counter() - start

    def digests(self) -> dict[str, str]:
        """SHA-256 of every weight of every worker, by "tp<rank>.<parameter>"; see `moerl_parameter_digests`."""
        workers = self._call(RuntimeError, "moerl_parameter_digests")
        return {f"tp{rank}.{name}": digest for rank, digests in enumerate(workers) for name, digest in digests.items()}

    def shutdown(self) -> None:
        """Stop the workers and free their memory. The engine cannot be used again."""
        self._version = None
        self._engine.engine_core.shutdown()

    def _call(self, error: type[Exception], method: str, *args: Any) -> list[Any]:
        """Answers of every worker; raises `error` with the first failed worker's message."""
        with self._turn:  # vLLM's workers answer one caller at a time
            answers = self._engine.collective_rpc(method, args=args)
        for rank, answer in enumerate(answers):
            if isinstance(answer, str):
                raise error(f"{answer} (worker {rank})")
        return answers

    def _completion(self, output: Any, version: int, finished: bool) -> Completion:
        if finished and output.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"vLLM ended a request with {output.finish_reason!r}")
        logprobs = [output.logprobs.logprobs[start] for start in output.logprobs.start_indices]
        return Completion(list(output.token_ids), logprobs, output.finish_reason if finished else "abort", version, self._version)

    def _check_request(self, prompts: list[list[int]], temperature: float, max_tokens: int, seeds: list | None) -> None:
        if temperature != 0 and temperature < MIN_TEMPERATURE:
            raise ValueError(f"temperature is {temperature}, must be 0 (greedy) or at least {MIN_TEMPERATURE}")
        if seeds is not None and len(seeds) != len(prompts):
            raise ValueError(f"{len(seeds)} seeds for {len(prompts)} prompts, must be one a prompt")
        room = self._max_model_len - max_tokens
        for i, prompt in enumerate(prompts):
            if not 0 < len(prompt) <= room:
                rule = f"must have 1 to {room} (max_model_len - max_tokens)"
                raise ValueError(f"prompt {i} has {len(prompt)} tokens, {rule}")
            if min(prompt) < 0 or max(prompt) >= self._vocab_size:
                raise ValueError(f"prompt {i} has a token id outside 0..{self._vocab_size - 1}")


_NO_VERSION = "no version of the weights: call load_weights or mark_loaded first"
_EMPTY = "the engine was started without weights: load them first"
_ASLEEP = "the engine sleeps: sync its weights first"
_INCOMPLETE = "the weights are incomplete, since loading them failed half-way: load them again"


def _set_environment(device: str, enforce_eager: bool, cpu_bind: str) -> None:
    """What vLLM and its workers read from the environment, to be set before vLLM is imported."""
    os.environ.update(
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",  # scheduler in this process: one process fewer to start and to talk to
    )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", "30")  # a killed worker leaves files in /dev/shm
    if device == "cpu":
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = cpu_bind
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # whole GiB only; kv_cache_memory_bytes says it instead
        # even an eager vLLM compiles a few small functions, which takes seconds at the first request
        os.environ["TORCH_COMPILE_DISABLE"] = "1" if enforce_eager else "0"
