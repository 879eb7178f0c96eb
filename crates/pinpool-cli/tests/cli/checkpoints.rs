//! `pinpool load` of safetensors files. (What is refused is in `hostile` and `refusals`, and in the loader's own tests.)

use super::folder::{Folder, file, made};
use super::{load, stdout, verifies};

/// A checkpoint of tensors with these lengths, and its bytes.
pub fn checkpoint(lens: &[usize]) -> Vec<u8> {
    let tensor = |(n, len): (u64, &usize)| made(&format!("t.{n}"), "U8", &[*len], n);
    file(&(0..).zip(lens).map(tensor).collect::<Vec<_>>())
}

#[test]
fn checkpoints_are_loaded_and_checked_tensor_by_tensor() {
    let files = Folder::new();
    let lens = [70_000, 0, 3, 16_384, 16_384, 300_000, 1];
    let first = files.put("model-1.safetensors", checkpoint(&lens));
    let second = files.put("model-2.safetensors", checkpoint(&[0]));
    let bytes: usize = lens.iter().sum();
    let report = verifies(load([&first, &second]).args(["--chunk", "64KiB"]), 4 << 20, bytes);
    assert!(report["upload_gb_per_s"].as_f64().unwrap() > 0.0);
    assert!(report["download_gb_per_s"].as_f64().unwrap() > 0.0);

    let output = load([&first]).args(["--verify", "--capacity", "8MiB"]).output().unwrap();
    let text = stdout(&output);
    assert!(text.contains("model-1.safetensors: 7 tensors, 393.3 KiB to host:0 in "), "{text}");
    assert!(text.contains("all checksums equal"), "{text}");

    // By an index of any name, of which one tensor is wanted. Other JSON files are bytes, as `pinpool load
    // FOLDER/*` names them.
    let map = r#"{"weight_map":{"t.3":"model-1.safetensors"}}"#;
    verifies(&mut load([&files.put("own.json", map)]), 8 << 20, 16_384);
    verifies(&mut load([&files.put("config.json", "{}")]), 8 << 20, 2);
    // By its folder. (Which files of a folder count is in the loader's tests.)
    std::fs::remove_file(second).unwrap();
    verifies(&mut load([files.path()]), 8 << 20, bytes);
}
