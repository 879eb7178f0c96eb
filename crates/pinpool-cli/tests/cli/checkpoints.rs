//! `pinpool load` of safetensors files. (What is refused is in `hostile` and `refusals`, and in the loader's own tests.)

use std::fs;

use super::{Files, load, stdout, verifies};

/// A checkpoint of tensors with these lengths, and its bytes.
pub fn checkpoint(lens: &[usize]) -> Vec<u8> {
    let (mut header, mut end) = (String::from("{"), 0);
    for (number, len) in lens.iter().enumerate() {
        let comma = if number > 0 { "," } else { "" };
        let to = end + len;
        header +=
            &format!(r#"{comma}"t.{number}":{{"dtype":"U8","shape":[{len}],"data_offsets":[{end},{to}]}}"#);
        end = to;
    }
    header.push('}');
    let bytes = (0..end).map(|i| (i / 251 + i % 251) as u8);
    (header.len() as u64).to_le_bytes().into_iter().chain(header.bytes()).chain(bytes).collect()
}

#[test]
fn checkpoints_are_loaded_and_checked_tensor_by_tensor() {
    let files = Files::new();
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
    let index = files.put("model.safetensors.index.json", map);
    verifies(&mut load([&files.put("own.json", map)]), 8 << 20, 16_384);
    verifies(&mut load([&files.put("config.json", "{}")]), 8 << 20, 2);
    // By its folder: the index that is there, and without it all files.
    fs::remove_file(files.path("own.json")).unwrap();
    verifies(&mut load([files.0.path()]), 8 << 20, 16_384);
    fs::remove_file(&index).unwrap();
    fs::remove_file(&second).unwrap();
    verifies(&mut load([files.0.path()]), 8 << 20, bytes);
}
