"""Public training programs that ``scripts/compat`` clones and runs unchanged, made small by their own options."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Program:
    """A program of a repository on GitHub. ``{data}`` in its command is the folder that ``made_up_data`` fills."""

    repository: str
    commit: str
    command: str
    """What follows ``ddplaunch --dry-run --nproc-per-node 2``."""
    folder: str = "."
    """Where the command runs."""
    packages: tuple[str, ...] = ()
    """Installed for this program alone, without what they depend on."""
    made_up_files: tuple[tuple[str, str], ...] = ()
    """Files that the repository lacks: (path in the repository, path in the data folder)."""


EXAMPLES = ("pytorch/examples", "77f55b912142e11fcfdf5b530231fb9c52f181e8")
IMAGENET = "-a resnet18 -b 4 --epochs 1 -j 1 {data}/images"
TITAN = (
    "-m torchtitan.train --job.config_file torchtitan/models/llama3/train_configs/debug_model.toml "
    "--training.local_batch_size 1 --training.seq_len 128 --training.steps 3"
)
TITAN_IS = {
    "repository": "pytorch/torchtitan",
    "commit": "73a0e6979dd10b6b1904098eb3c8f62c18ab87ce",
    "packages": ("triton",),
    "made_up_files": (("tests/assets/c4_test/data.json", "texts.json"),),
}

PROGRAMS: dict[str, Program] = {
    "nanoGPT": Program(
        "karpathy/nanoGPT",
        "3adf61e154c3fe3fca428ad6bc3818b27a3b8291",
        "train.py config/train_shakespeare_char.py --dataset=made_up --max_iters=20 --eval_interval=10 --eval_iters=2 "
        "--n_layer=2 --n_head=2 --n_embd=32 --block_size=32 --batch_size=4 --gradient_accumulation_steps=2",
        made_up_files=(("data/made_up/train.bin", "tokens.bin"), ("data/made_up/val.bin", "tokens.bin")),
    ),
    "minGPT": Program(
        "karpathy/minGPT",
        "37baab71b9abea1b76ab957409a1cc2fbfba8a26",
        "-m projects.adder.adder --trainer.max_iters=20",
    ),
    "examples, ddp": Program(*EXAMPLES, "example.py", "distributed/ddp"),
    "examples, ddp-tutorial": Program(*EXAMPLES, "multigpu_torchrun.py 2 1", "distributed/ddp-tutorial-series"),
    "examples, ddp-tutorial, mp.spawn": Program(
        *EXAMPLES, "--nproc-per-node 1 --gpus 0,1 multigpu.py 2 1", "distributed/ddp-tutorial-series"
    ),
    "examples, minGPT-ddp": Program(
        *EXAMPLES,
        "main.py data_config.path={data}/text.txt data_config.truncate=1.0 data_config.block_size=16 "
        "gpt_config.n_layer=2 gpt_config.n_head=2 gpt_config.n_embd=32 trainer_config.batch_size=64 "
        "trainer_config.max_epochs=1 trainer_config.data_loader_workers=1 trainer_config.use_amp=False",
        "distributed/minGPT-ddp/mingpt",
    ),
    "examples, imagenet": Program(*EXAMPLES, f"main.py --dist-url env:// {IMAGENET}", "imagenet"),
    "examples, imagenet, mp.spawn": Program(
        *EXAMPLES,
        "--nproc-per-node 1 --gpus 0,1 main.py --multiprocessing-distributed --world-size 1 --rank 0 "
        f"--dist-url tcp://127.0.0.1:23456 {IMAGENET}",
        "imagenet",
    ),
    "examples, FSDP2": Program(*EXAMPLES, "example.py --mixed-precision --dcp-api", "distributed/FSDP2"),
    "examples, tensor parallel": Program(*EXAMPLES, "tensor_parallel_example.py", "distributed/tensor_parallelism"),
    "examples, sequence parallel": Program(*EXAMPLES, "sequence_parallel_example.py", "distributed/tensor_parallelism"),
    "examples, FSDP and tensor parallel": Program(
        *EXAMPLES, "--nproc-per-node 4 fsdp_tp_example.py", "distributed/tensor_parallelism"
    ),
    "timm": Program(
        "huggingface/pytorch-image-models",
        "aa4b5850c1543fa488abf260f18390eda46cf85d",
        "train.py --data-dir {data}/images --model resnet10t --num-classes 2 --img-size 64 -b 2 --epochs 1 --amp "
        "--workers 1",
    ),
    "dino": Program(
        "facebookresearch/dino",
        "7c446df5b9f45747937fb0d72314eb9f7b66930a",
        "main_dino.py --arch vit_tiny --data_path {data}/images/train --output_dir . --epochs 1 "
        "--batch_size_per_gpu 2 --num_workers 1 --local_crops_number 2 --out_dim 256 --warmup_epochs 0 "
        "--warmup_teacher_temp_epochs 0 --use_fp16 false",
    ),
    "Swin": Program(
        "microsoft/Swin-Transformer",
        "f82860bfb5225915aca09c3227159ee9e1df874d",
        "main.py --cfg configs/swin/swin_tiny_patch4_window7_224.yaml --data-path {data}/images --batch-size 2 "
        "--disable_amp --opts TRAIN.EPOCHS 1 TRAIN.WARMUP_EPOCHS 0 MODEL.SWIN.EMBED_DIM 12 "
        "MODEL.SWIN.DEPTHS [1,1,1,1] MODEL.NUM_CLASSES 2 DATA.NUM_WORKERS 1 AUG.AUTO_AUGMENT none",
        packages=("timm==0.4.12",),
    ),
    "llm.c": Program(
        "karpathy/llm.c",
        "f1e2ace651495b74ae22d45d1723443fd00ecd3a",
        "train_gpt2.py --model d12 --input_bin {data}/llmc.bin --write_tensors 0 --batch_size 1 --sequence_length 32 "
        "--total_batch_size 64 --num_iterations 2 --zero_stage 1 --dtype bfloat16 --compile 1",
    ),
    "open_clip": Program(
        "mlfoundations/open_clip",
        "89fb801f1e6087880e951fc8354b8a2077b79c6d",
        "-m open_clip_train.main --dataset-type synthetic --train-num-samples 8 --model ViT-S-32-alt --batch-size 2 "
        "--epochs 1 --workers 1 --warmup 1",
        "src",
    ),
    "torchtitan, llama3 debug model, FSDP2": Program(command=TITAN, **TITAN_IS),
    "torchtitan, llama3 debug model, tensor parallel": Program(
        command=f"{TITAN} --parallelism.tensor_parallel_degree 2", **TITAN_IS
    ),
}
