/work/main/tests/doubles/cuda/target/debug/deps/cuda_standin-c3671bf99acde749.d: src/lib.rs src/batches.rs src/calls.rs src/control.rs src/graphs.rs src/host.rs src/hostfn.rs src/kernels.rs src/others.rs src/pointers.rs src/pools.rs src/rows.rs src/../../control.rs src/streams.rs src/world.rs

/work/main/tests/doubles/cuda/target/debug/deps/libcuda_standin-c3671bf99acde749.rmeta: src/lib.rs src/batches.rs src/calls.rs src/control.rs src/graphs.rs src/host.rs src/hostfn.rs src/kernels.rs src/others.rs src/pointers.rs src/pools.rs src/rows.rs src/../../control.rs src/streams.rs src/world.rs

src/lib.rs:
src/batches.rs:
src/calls.rs:
src/control.rs:
src/graphs.rs:
src/host.rs:
src/hostfn.rs:
src/kernels.rs:
src/others.rs:
src/pointers.rs:
src/pools.rs:
src/rows.rs:
src/../../control.rs:
src/streams.rs:
src/world.rs:
