#!/bin/bash
# fp8 beside bf16 and beside FSDP2 with torchao, on one GPU: rank 0 of 8 pretended ranks, then losses over 500 steps.
# torchao must be importable for FSDP2's rows. Usage: benchmarks/fp8.sh OUT_FOLDER [speed|loss|all]
set -u
out=$1 what=${2:-all}
cd "$(dirname "$0")/.." || exit 1
if [ "$what" != loss ]; then
    for work in 8b 1b; do
        python benchmarks/peers.py --pretend 8 --work $work --rounds 2 --compile --hang-timeout 400 \
            --peers polyshard,polyshard-fp8,polyshard-fp8-all,fsdp2,fsdp2-fp8-tensorwise,fsdp2-fp8-rowwise \
            --out "$out/fp8-$work.json" 2>&1 | cut -c1-400
    done
fi
if [ "$what" != speed ]; then
    torchrun --standalone --nproc-per-node 1 benchmarks/peers.py --train 500 --every 50 --work 300m --compile \
        --hang-timeout 400 --peers polyshard,polyshard-fp8,polyshard-fp8-all --out "$out/fp8-300m-losses.json" 2>&1 |
        cut -c1-600
fi
