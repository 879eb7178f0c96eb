//! The same on a GPU, of the stand-in driver or of the machine's own.

use crate::support::doubles::gpu_name;
use pinpool::copier::Copier;
use pinpool::{Device, Pool, Unpinned};
use pinpool_safetensors::Checkpoint;

use super::{Folder, Made, arrived, file, made};
use crate::support::doubles::gpu::on_gpu;

#[test]
fn tensors_arrive_on_a_gpu() {
    on_gpu(|_| {
        let folder = Folder::new();
        let mut tensors: Vec<Made> =
            (0..300).map(|i| made(&format!("small.{i:03}"), "BF16", &[64, 128], i)).collect();
        tensors.push(made("none", "F32", &[0], 1));
        tensors.extend((0..4).map(|i| made(&format!("wide.{i}"), "F32", &[333, 999 + i as usize], i)));
        let paths = [
            folder.put("1.safetensors", file(&tensors[..200])),
            folder.put("2.safetensors", file(&tensors[200..])),
        ];
        let device = Device::open(&gpu_name(0)).unwrap();
        let pool = Pool::builder(&device).capacity(32 << 20).unpinned(Unpinned::Allow).build().unwrap();
        let copier = Copier::builder(&pool, &device).chunk(256 << 10).build().unwrap();
        let checkpoint = Checkpoint::open_files(&paths).unwrap();
        let got = checkpoint.loader(&copier).align(256).load().unwrap();
        let stats = pool.stats();
        assert_eq!(stats.checked_out_bytes + stats.in_flight_bytes, 0, "{stats:?}");
        arrived(&copier, &got, &tensors);
    });
}
