#!/usr/bin/env python3
"""Exported models compute in Hugging Face transformers what they compute in Troupe: models of all
MoE architectures are trained for a few steps, on one rank and under TP2 x EP2, and exported;
transformers reads each folder and writes logits and gradients, with which `troupe verify` compares
its own (logits within 1e-4 in fp32). Needs torch and transformers, which machines with a GPU have;
without a GPU it compares on the CPU alone.

Usage: hf_logits_gpu_test.py TROUPE SOURCE_FOLDER
"""

import json
import pathlib
import sys
import unittest

sys.path[:0] = [str(pathlib.Path(__file__).parents[1] / name) for name in ("support", "fixtures")]
from program_runs import HERE, main, run, write_corpus

SHAPE = {"vocab_size": 272, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
         "initializer_range": 0.08, "tie_word_embeddings": False, "rope_theta": 500000.0,
         "num_experts_per_tok": 3}
DEEPSEEK = {"n_routed_experts": 12, "moe_intermediate_size": 48, "n_shared_experts": 1,
            "first_k_dense_replace": 1, "intermediate_size": 80, "routed_scaling_factor": 1.5}
LATENT = DEEPSEEK | {"num_key_value_heads": 4, "kv_lora_rank": 20, "qk_nope_head_dim": 12,
                     "qk_rope_head_dim": 8, "v_head_dim": 14}
MODELS = {
    "mixtral": {"architectures": ["MixtralForCausalLM"], "num_local_experts": 12,
                "intermediate_size": 48},
    "qwen2_moe": {"architectures": ["Qwen2MoeForCausalLM"], "num_experts": 12,
                  "moe_intermediate_size": 48, "shared_expert_intermediate_size": 64,
                  "norm_topk_prob": False},
    "qwen3_moe": {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 12, "head_dim": 24,
                  "moe_intermediate_size": 48, "norm_topk_prob": True},
    "olmoe": {"architectures": ["OlmoeForCausalLM"], "num_experts": 12, "intermediate_size": 48,
              "norm_topk_prob": False, "pad_token_id": None},
    "deepseek_v2": LATENT | {"architectures": ["DeepseekV2ForCausalLM"], "q_lora_rank": None,
                             "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    "deepseek_v3": LATENT | {"architectures": ["DeepseekV3ForCausalLM"], "q_lora_rank": 24,
                             "n_group": 4, "topk_group": 2, "norm_topk_prob": True,
                             "rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": 1.0,
                                              "mscale_all_dim": 1.0,
                                              "original_max_position_embeddings": 16}},
    "glm4_moe": DEEPSEEK | {"architectures": ["Glm4MoeForCausalLM"], "attention_bias": True,
                            "partial_rotary_factor": 0.5, "use_qk_norm": True, "head_dim": 16,
                            "n_group": 1, "topk_group": 1, "norm_topk_prob": True},
    "gpt_oss": {"architectures": ["GptOssForCausalLM"], "num_local_experts": 12, "head_dim": 16,
                "intermediate_size": 48, "sliding_window": 9},
}
LAYOUTS = {"one": (), "tp2_ep2": ("--ranks", 4, "--tensor-model-parallel-size", 2,
                                  "--expert-model-parallel-size", 2, "--sequence-parallel",
                                  "--expert-tensor-parallel-size", 1)}
SEQUENCE = 40
TOLERANCE = 1e-4  # fp32 sums in other orders; verify's own for logits


def setUpModule():
    try:
        import make_references  # pylint: disable=import-outside-toplevel,unused-import
    except ImportError as error:
        raise unittest.SkipTest(f"needs torch, transformers and safetensors: {error}") from error
    write_corpus(30, 40)


class HfLogits(unittest.TestCase):
    def troupe(self, *arguments):
        done = run(*arguments)
        self.assertIn(done.returncode, (0, 1), done.stderr)
        return done

    def export(self, name, layout):
        shape = HERE.folder / f"{name}.json"
        shape.write_text(json.dumps(SHAPE | MODELS[name]))
        save, out = HERE.folder / f"{name}_{layout}", HERE.folder / f"{name}_{layout}_hf"
        for arguments in (
                ("train", "--model", shape, "--data-path", HERE.folder / "corpus", "--seq-length",
                 SEQUENCE, "--lr", "1e-3", "--train-iters", 3, "--global-batch-size", 4, "--save",
                 save, "--quiet", *LAYOUTS[layout]),
                ("convert", "--load", save, "--save", out)):
            done = self.troupe(*arguments)
            self.assertEqual(done.returncode, 0, done.stderr)
        return out

    def add_reference(self, folder):
        import torch
        import transformers
        from make_references import write_reference
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager").eval()
        ids = torch.randint(0, SHAPE["vocab_size"], (2, SEQUENCE + 1))
        write_reference(folder, folder.name, model, ids)
        return ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])

    def test_logits_agree(self):
        for name in MODELS:
            for layout in LAYOUTS:
                with self.subTest(model=name, layout=layout):
                    folder = self.export(name, layout)
                    for device in self.add_reference(folder):
                        done = self.troupe("verify", folder, "--json", "--device", device)
                        result = json.loads(done.stdout)
                        print(name, layout, device, "largest difference of logits",
                              result["logits_max_abs"])
                        self.assertLessEqual(result["logits_max_abs"], TOLERANCE)
                        self.assertTrue(result["pass"], done.stdout)


if __name__ == "__main__":
    main()
