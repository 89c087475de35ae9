"""What Hugging Face's own programs make of model folders. Needs `tokenizers`, and for `read` also
`transformers`, both without torch.

Usage: hf_reader.py make-tokenizer FOLDER    writes tokenizer files for FOLDER
       hf_reader.py read TEXT_FILE FOLDER...  prints one JSON object: by folder, what AutoConfig,
                                              AutoTokenizer and GenerationConfig read
"""

import json
import pathlib
import sys

WORDS = ("the mill runs by the river where copper and tin are worn slowly into bright stone; "
         "light falls over wheels, wheels fall over light. don't we'll I've 12 345 6789 ").split()


def make_tokenizer(folder):
    """Byte-level BPE, trained on a fixed text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(text, special=True)
                        for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")])
    tokenizer.train_from_iterator([" ".join(WORDS)] * 3, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = ("{% for message in messages %}<|im_start|>{{ message.role }}\n"
                "{{ message.content }}<|im_end|>\n{% endfor %}")
    (folder / "tokenizer_config.json").write_text(json.dumps(
        {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|endoftext|>",
         "eos_token": "<|im_end|>", "model_max_length": 4096,
         "clean_up_tokenization_spaces": False, "chat_template": template}, indent=2))
    (folder / "special_tokens_map.json").write_text(json.dumps(
        {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}))
    (folder / "generation_config.json").write_text(json.dumps(
        {"bos_token_id": 0, "eos_token_id": [2, 0], "do_sample": True, "temperature": 0.7,
         "top_p": 0.8}))


def read(text, folder):
    """Whatever a reader sees, as JSON."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig
    config = AutoConfig.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    fields = config.to_dict()
    # The folder's name is no field.
    fields.pop("_name_or_path", None)
    chat = None
    if tokenizer.chat_template:
        chat = tokenizer.apply_chat_template([{"role": "user", "content": "Where is the mill?"}],
                                             tokenize=False)
    try:
        generation = GenerationConfig.from_pretrained(folder).to_dict()
    except OSError:
        generation = None
    return {"config": fields, "num_experts": getattr(config, "num_experts", None),
            "num_local_experts": getattr(config, "num_local_experts", None), "ids": ids,
            "decoded": tokenizer.decode(ids), "vocabulary": len(tokenizer),
            "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
            "eos_id": tokenizer.eos_token_id, "chat": chat, "generation": generation}


def main():
    if sys.argv[1] == "make-tokenizer":
        make_tokenizer(pathlib.Path(sys.argv[2]))
        return
    text = pathlib.Path(sys.argv[2]).read_bytes().decode()  # line ends as they are
    found = {folder: read(text, folder) for folder in sys.argv[3:]}
    print(json.dumps(found, default=str))


if __name__ == "__main__":
    main()
