"""The tensors and parameters of the models in the repository, under the names that public clients and the C++ backend
use.

Rows are `name dtype dims flags`; `scalar` is Triton's empty reshape (a `[1]` tensor arrives as a scalar per request),
`ragged` is allow_ragged_batch, LOGITS stands for the dtype of the engines' logits, FP32 or FP16. Knows names, shapes
and kinds of values only: what a model does with a tensor, and which ones it refuses, is the model's affair.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from trtspec.decoding.methods import DRAFTS, METHODS, MIDDLES

LOGITS = "LOGITS"
LOGITS_DTYPES = {"float32": "FP32", "float16": "FP16"}  # engine.logits_dtype -> Triton


@dataclass(frozen=True)
class Tensor:
    """One input or output as config.pbtxt declares it; `dims` are without the batch dimension."""

    name: str
    dtype: str
    dims: tuple[int, ...]
    optional: bool = False
    scalar: bool = False
    ragged: bool = False


def _table(text: str) -> tuple[Tensor, ...]:
    tensors = []
    for row in text.split("\n"):
        if row.strip():
            name, dtype, dims, *flags = row.split()
            shape = tuple(int(size) for size in dims.split(","))
            tensors.append(Tensor(name, dtype, shape, **dict.fromkeys(flags, True)))
    return tuple(tensors)


def _keys(text: str) -> frozenset[str]:
    return frozenset(text.split())


# What an engine reports about one request, beside its tokens; the BLS and the ensemble pass these names on.
_REPORT = """
kv_cache_alloc_new_blocks           INT32   1
kv_cache_reused_blocks              INT32   1
kv_cache_alloc_total_blocks         INT32   1
arrival_time_ns                     INT64   1
first_scheduled_time_ns             INT64   1
first_token_time_ns                 INT64   1
last_token_time_ns                  INT64   1
acceptance_rate                     FP32    1
total_accepted_draft_tokens         INT32   1
total_draft_tokens                  INT32   1
num_input_tokens                    INT32   1
num_output_tokens                   INT32   1
"""
_SCORES = """
cum_log_probs                       FP32    -1
output_log_probs                    FP32    -1,-1
context_logits                      LOGITS  -1,-1
generation_logits                   LOGITS  -1,-1,-1
batch_index                         INT32   1
sequence_index                      INT32   1
"""

ENGINE_INPUTS = _table("""
input_ids                           INT32   -1     optional ragged
encoder_input_features              FP16    -1,-1  optional ragged
encoder_output_lengths              INT32   1      optional scalar
input_lengths                       INT32   1      scalar
request_output_len                  INT32   1      scalar
num_return_sequences                INT32   1      optional scalar
draft_input_ids                     INT32   -1     optional ragged
decoder_input_ids                   INT32   -1     optional ragged
decoder_input_lengths               INT32   1      optional scalar
draft_logits                        LOGITS  -1,-1  optional ragged
draft_acceptance_threshold          FP32    1      optional scalar
end_id                              INT32   1      optional scalar
pad_id                              INT32   1      optional scalar
stop_words_list                     INT32   2,-1   optional ragged
bad_words_list                      INT32   2,-1   optional ragged
embedding_bias                      FP32    -1     optional ragged
beam_width                          INT32   1      optional scalar
temperature                         FP32    1      optional scalar
runtime_top_k                       INT32   1      optional scalar
runtime_top_p                       FP32    1      optional scalar
runtime_top_p_min                   FP32    1      optional scalar
runtime_top_p_decay                 FP32    1      optional scalar
runtime_top_p_reset_ids             INT32   1      optional scalar
len_penalty                         FP32    1      optional scalar
early_stopping                      BOOL    1      optional scalar
repetition_penalty                  FP32    1      optional scalar
min_tokens                          INT32   1      optional scalar
beam_search_diversity_rate          FP32    1      optional scalar
presence_penalty                    FP32    1      optional scalar
frequency_penalty                   FP32    1      optional scalar
seed                                UINT64  1      optional scalar
return_log_probs                    BOOL    1      optional scalar
return_context_logits               BOOL    1      optional scalar
return_generation_logits            BOOL    1      optional scalar
return_perf_metrics                 BOOL    1      optional scalar
return_num_input_tokens             BOOL    1      optional scalar
return_num_output_tokens            BOOL    1      optional scalar
exclude_input_in_output             BOOL    1      optional scalar
stop                                BOOL    1      optional scalar
streaming                           BOOL    1      optional scalar
prompt_embedding_table              FP16    -1,-1  optional ragged
prompt_table_extra_ids              UINT64  -1     optional ragged
prompt_vocab_size                   INT32   1      optional scalar
cross_attention_mask                BOOL    -1,-1  optional ragged
mrope_rotary_cos_sin                FP32    -1     optional
mrope_position_deltas               INT64   1      optional
lora_task_id                        UINT64  1      optional scalar
lora_weights                        FP16    -1,-1  optional ragged
lora_config                         INT32   -1,3   optional ragged
context_phase_params                UINT8   -1     optional ragged
skip_cross_attn_blocks              BOOL    1      optional ragged
retention_token_range_starts        INT32   -1     optional ragged
retention_token_range_ends          INT32   -1     optional ragged
retention_token_range_priorities    INT32   -1     optional ragged
retention_token_range_durations_ms  INT32   -1     optional ragged
retention_decode_priority           INT32   1      optional ragged
retention_decode_duration_ms        INT32   1      optional ragged
guided_decoding_guide_type          STRING  1      optional ragged
guided_decoding_guide               STRING  1      optional ragged
lookahead_window_size               INT32   1      optional ragged
lookahead_ngram_size                INT32   1      optional ragged
lookahead_verification_set_size     INT32   1      optional ragged
""")

ENGINE_OUTPUTS = _table(f"""
output_ids                          INT32   -1,-1
sequence_length                     INT32   -1
{_SCORES}
context_phase_params                UINT8   -1
{_REPORT}
""")

BLS_INPUTS = _table("""
text_input                          STRING  1
decoder_text_input                  STRING  1            optional
image_input                         FP16    -1,3,-1,-1   optional
image_bytes_input                   UINT8   -1,-1,-1,-1  optional
image_url_input                     STRING  1            optional
image_sizes_input                   INT64   -1,2         optional
video_bytes_input                   UINT8   -1,-1,-1,-1  optional
max_tokens                          INT32   1
bad_words                           STRING  -1           optional
stop_words                          STRING  -1           optional
exclude_input_in_output             BOOL    1            optional
end_id                              INT32   1            optional
pad_id                              INT32   1            optional
top_k                               INT32   1            optional
top_p                               FP32    1            optional
temperature                         FP32    1            optional
length_penalty                      FP32    1            optional
repetition_penalty                  FP32    1            optional
min_tokens                          INT32   1            optional
presence_penalty                    FP32    1            optional
frequency_penalty                   FP32    1            optional
seed                                UINT64  1            optional
return_log_probs                    BOOL    1            optional scalar
return_context_logits               BOOL    1            optional scalar
return_generation_logits            BOOL    1            optional scalar
num_return_sequences                INT32   1            optional scalar
beam_width                          INT32   1            optional
stream                              BOOL    1            optional
prompt_embedding_table              FP16    -1,-1        optional
prompt_vocab_size                   INT32   1            optional
prompt_table_extra_id               UINT64  1            optional
embedding_bias_words                STRING  -1           optional
embedding_bias_weights              FP32    -1           optional
num_draft_tokens                    INT32   1            optional
use_draft_logits                    BOOL    1            optional scalar
lora_task_id                        UINT64  1            optional scalar
lora_weights                        FP16    -1,-1        optional ragged
lora_config                         INT32   -1,3         optional ragged
return_perf_metrics                 BOOL    1            optional scalar
return_num_input_tokens             BOOL    1            optional scalar
return_num_output_tokens            BOOL    1            optional scalar
guided_decoding_guide_type          STRING  1            optional
guided_decoding_guide               STRING  1            optional
""")

ENSEMBLE_OUTPUTS = _table(f"""
text_output                         STRING  -1
{_SCORES}
{_REPORT}
""")

# The last three are this pipeline's own: the ids of the new text, how often the target ran (0: not known, because the
# engine drafts by itself), and why it ended.
BLS_OUTPUTS = ENSEMBLE_OUTPUTS + _table("""
output_ids                          INT32   -1
total_target_passes                 INT32   1
finish_reason                       STRING  1
""")

PREPROCESSING_INPUTS = _table("""
QUERY                               STRING  1
DECODER_QUERY                       STRING  1            optional
IMAGE_BYTES                         UINT8   -1,-1,-1,-1  optional
IMAGE_URL                           STRING  -1           optional
IMAGE_SIZES                         INT64   -1,2         optional
VIDEO_BYTES                         UINT8   -1,-1,-1,-1  optional
REQUEST_OUTPUT_LEN                  INT32   1
BAD_WORDS_DICT                      STRING  -1           optional
STOP_WORDS_DICT                     STRING  -1           optional
EMBEDDING_BIAS_WORDS                STRING  -1           optional
EMBEDDING_BIAS_WEIGHTS              FP32    -1           optional
END_ID                              INT32   1            optional
PAD_ID                              INT32   1            optional
PROMPT_TABLE_EXTRA_ID               UINT64  1            optional
""")

PREPROCESSING_OUTPUTS = _table("""
INPUT_ID                            INT32   -1
REQUEST_INPUT_LEN                   INT32   1
DECODER_INPUT_ID                    INT32   -1
REQUEST_DECODER_INPUT_LEN           INT32   1
BAD_WORDS_IDS                       INT32   2,-1
STOP_WORDS_IDS                      INT32   2,-1
EMBEDDING_BIAS                      FP32    -1
REQUEST_OUTPUT_LEN                  INT32   -1
OUT_END_ID                          INT32   1
OUT_PAD_ID                          INT32   1
OUT_PROMPT_TABLE_EXTRA_IDS          UINT64  -1
PIXEL_VALUES                        FP16    -1,-1,-1,-1
ASPECT_RATIO_IDS                    INT64   -1
ASPECT_RATIO_MASK                   INT64   -1,-1
CROSS_ATTENTION_MASK                INT64   -1,-1,-1
IMAGE_SIZES                         INT64   -1,2
IS_VIDEO_INPUT                      BOOL    1
ATTENTION_MASK                      INT64   -1
IMAGE_GRID_THW                      INT64   3
VISION_INPUT_ID                     INT32   -1
""")

POSTPROCESSING_INPUTS = _table("""
TOKENS_BATCH                        INT32   -1,-1
SEQUENCE_LENGTH                     INT32   -1
""")

POSTPROCESSING_OUTPUTS = _table("""
OUTPUT                              STRING  -1
""")

ENSEMBLE_INPUTS = _table("""
text_input                          STRING  1
decoder_text_input                  STRING  1      optional
max_tokens                          INT32   1
num_return_sequences                INT32   1      optional
bad_words                           STRING  -1     optional
stop_words                          STRING  -1     optional
exclude_input_in_output             BOOL    1      optional
end_id                              INT32   1      optional
pad_id                              INT32   1      optional
top_k                               INT32   1      optional
top_p                               FP32    1      optional
temperature                         FP32    1      optional
length_penalty                      FP32    1      optional
repetition_penalty                  FP32    1      optional
min_tokens                          INT32   1      optional
presence_penalty                    FP32    1      optional
frequency_penalty                   FP32    1      optional
seed                                UINT64  1      optional
return_log_probs                    BOOL    1      optional
return_context_logits               BOOL    1      optional
return_generation_logits            BOOL    1      optional
return_perf_metrics                 BOOL    1      optional
return_num_input_tokens             BOOL    1      optional
return_num_output_tokens            BOOL    1      optional
beam_width                          INT32   1      optional
stream                              BOOL    1      optional
prompt_embedding_table              FP16    -1,-1  optional
prompt_table_extra_id               UINT64  1      optional
prompt_vocab_size                   INT32   1      optional
embedding_bias_words                STRING  -1     optional
embedding_bias_weights              FP32    -1     optional
lora_task_id                        UINT64  1      optional
lora_weights                        FP16    -1,-1  optional ragged
lora_config                         INT32   -1,3   optional ragged
guided_decoding_guide_type          STRING  1      optional ragged
guided_decoding_guide               STRING  1      optional ragged
""")

# The ensemble's steps: model -> ({its input: ensemble tensor}, {its output: ensemble tensor}). Names with a leading
# underscore exist between the steps only. Engine tensors of the ensemble's own inputs are wired by ENGINE_RENAMES.
PREPROCESSING_MAP = (
    {
        "QUERY": "text_input",
        "DECODER_QUERY": "decoder_text_input",
        "REQUEST_OUTPUT_LEN": "max_tokens",
        "BAD_WORDS_DICT": "bad_words",
        "STOP_WORDS_DICT": "stop_words",
        "EMBEDDING_BIAS_WORDS": "embedding_bias_words",
        "EMBEDDING_BIAS_WEIGHTS": "embedding_bias_weights",
        "END_ID": "end_id",
        "PAD_ID": "pad_id",
        "PROMPT_TABLE_EXTRA_ID": "prompt_table_extra_id",
    },
    {
        "INPUT_ID": "_INPUT_ID",
        "REQUEST_INPUT_LEN": "_REQUEST_INPUT_LEN",
        "REQUEST_OUTPUT_LEN": "_REQUEST_OUTPUT_LEN",
        "STOP_WORDS_IDS": "_STOP_WORDS_IDS",
        "BAD_WORDS_IDS": "_BAD_WORDS_IDS",
        "EMBEDDING_BIAS": "_EMBEDDING_BIAS",
        "OUT_END_ID": "_PREPROCESSOR_END_ID",
        "OUT_PAD_ID": "_PREPROCESSOR_PAD_ID",
    },
)
ENGINE_FROM_PREPROCESSING = {
    "input_ids": "_INPUT_ID",
    "input_lengths": "_REQUEST_INPUT_LEN",
    "request_output_len": "_REQUEST_OUTPUT_LEN",
    "stop_words_list": "_STOP_WORDS_IDS",
    "bad_words_list": "_BAD_WORDS_IDS",
    "embedding_bias": "_EMBEDDING_BIAS",
    "end_id": "_PREPROCESSOR_END_ID",
    "pad_id": "_PREPROCESSOR_PAD_ID",
}
ENGINE_RENAMES = {
    "top_k": "runtime_top_k",
    "top_p": "runtime_top_p",
    "length_penalty": "len_penalty",
    "stream": "streaming",
}
POSTPROCESSING_MAP = (
    {"TOKENS_BATCH": "_TOKENS_BATCH", "SEQUENCE_LENGTH": "_SEQUENCE_LENGTH"},
    {"OUTPUT": "text_output"},
)

# What the values of parameters look like: kind -> (pattern of the whole value, words for it).
_KINDS = {
    "bool": (r"true|false|1|0", "true or false"),
    "int": (r"\d+", "a whole number"),
    "ints": (r"\d+(,\d+)*", "whole numbers with commas between them"),
    "fraction": (r"0?\.\d+|0|1(\.0*)?", "a number from 0 to 1"),
    "groups": (r"\d+(,\d+)*(;\d+(,\d+)*)*", 'numbers such as "0,1", a semicolon between instances'),
    "tree": (r"\{\d+(, ?\d+)*\}(, ?\{\d+(, ?\d+)*\})*", 'paths such as "{0}, {1}, {0, 0}"'),
    "text": (r"[^\x00-\x1f]+", "some text on one line"),
    "batching": (r"V1|v1|inflight_batching|inflight_fused_batching", "inflight_fused_batching"),
    "policy": (r"max_utilization|guaranteed_no_evict", "max_utilization or guaranteed_no_evict"),
    "decoding": (
        r"top_k|top_p|top_k_top_p|beam_search|medusa|redrafter|lookahead|eagle",
        "top_k, top_p, top_k_top_p, beam_search, medusa, redrafter, lookahead or eagle",
    ),
    "guide": (r"xgrammar", "xgrammar"),
    "no": (r"no", "no"),
}
# The parameters of engine models in the C++ backend, and one of our own, with the kind of their values.
ENGINE_PARAMETERS = dict(
    row.split()
    for row in """
    FORCE_CPU_ONLY_INPUT_TENSORS no
    batch_scheduler_policy policy
    cancellation_check_period_ms int
    cross_kv_cache_fraction fraction
    cuda_graph_cache_size int
    cuda_graph_mode bool
    decoding_mode decoding
    eagle_choices tree
    enable_chunked_context bool
    enable_context_fmha_fp32_acc bool
    enable_kv_cache_reuse bool
    encoder_model_path text
    exclude_input_in_output bool
    executor_worker_path text
    gpt_model_path text
    gpt_model_type batching
    gpu_device_ids groups
    gpu_weights_percent fraction
    guided_decoding_backend guide
    iter_stats_max_iterations int
    kv_cache_free_gpu_mem_fraction fraction
    kv_cache_host_memory_bytes int
    kv_cache_onboard_blocks bool
    lookahead_ngram_size int
    lookahead_verification_set_size int
    lookahead_window_size int
    lora_cache_gpu_memory_fraction fraction
    lora_cache_host_memory_bytes int
    lora_cache_max_adapter_size int
    lora_cache_optimal_adapter_size int
    lora_prefetch_dir text
    max_attention_window_size ints
    max_beam_width int
    max_tokens_in_paged_kv_cache int
    medusa_choices tree
    multi_block_mode bool
    normalize_log_probs bool
    num_nodes int
    participant_ids groups
    recv_poll_period_ms int
    request_stats_max_iterations int
    sink_token_length int
    speculative_decoding_fast_logits bool
    stats_check_period_ms int
    tokenizer_dir text
    trtspec_kv_cache_bytes int
    xgrammar_tokenizer_info_path text
    """.strip().split("\n")
)


def wrong_value(parameter: str, value: str) -> str | None:
    """What a value of this engine parameter looks like, in words, when `value` does not; None when it does."""
    pattern, words = _KINDS[ENGINE_PARAMETERS[parameter]]
    return None if re.fullmatch(pattern, value) else words


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint naming the closest of `known`, or listing them all."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(names)}"


_BLS_PARAMETERS = _keys(
    """
    accumulate_tokens tensorrt_llm_model_name multimodal_encoders_name
    acceptance add_bos alternate_phases bos_token bos_token_id call_timeout_s chat_template draft_length_policy
    draft_length_schedule draft_length_token_cost draft_rest_s draft_timeout_s max_queued
    end_id end_ids eos_token exclude_input_in_output greedy_only logits_dtype
    max_concurrency max_draft_len max_input_len method
    num_draft_tokens pad_id plain_chunk_tokens skip_special_tokens target_max_seq_len vocab_size
    """
)
_BLS_PARAMETERS |= {f"{method}_{setting}" for method, row in METHODS.items() for setting in row.settings}
for _role in (*MIDDLES, *DRAFTS):
    _BLS_PARAMETERS |= {f"tensorrt_llm_{_role}_model_name"}
    _BLS_PARAMETERS |= {f"{_role}_{fact}" for fact in ("max_seq_len", "returns_logits", "vocab_size")}
MODEL_PARAMETERS = {
    "preprocessing": frozenset({"add_bos", "bos_token_id", "end_id", "pad_id", "vocab_size"}),
    "postprocessing": frozenset({"skip_special_tokens"}),
    "tensorrt_llm_bls": _BLS_PARAMETERS,
    "tensorrt_llm_bls_unary": _BLS_PARAMETERS,
}
