"""The models of the case `models`: each builder returns a Subject, by name."""

from models.encoder import bert_base, minilm
from models.gpt2 import gpt2_decode, gpt2_untied_decode
from models.llama import llama_decode
from models.resnet import resnet50
from models.subject import Subject

BUILDERS = {
    "minilm": minilm,
    "bert-base": bert_base,
    "gpt2-decode": gpt2_decode,
    "gpt2-untied-decode": gpt2_untied_decode,
    "llama3-8b-decode": llama_decode,
    "resnet50": resnet50,
}

__all__ = ["BUILDERS", "Subject"]
