//! Both loaders give the same tensors and the same tokens, a tensor can be had before the others, and errors come out
//! as errors.

use std::collections::HashMap;
use std::fs::OpenOptions;
use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use pinpool::Copier;
use pinpool_candle::checkpoint::{Size, write};
use pinpool_candle::model::{Model, encode, files};
use pinpool_candle::{Pinned, Weights};

fn small() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    write(Size::Small, 7, folder.path()).unwrap();
    folder
}

fn pinned(capacity: usize) -> Pinned {
    Pinned::new(&Device::Cpu, capacity).unwrap()
}

fn bytes(tensor: &Tensor) -> Vec<u8> {
    let mut bytes = Vec::new();
    tensor.write_bytes(&mut bytes).unwrap();
    bytes
}

/// 16 tensors of 2 MiB, `"00"` to `"15"`, whose load takes two seconds: eight chunks.
fn slow() -> (tempfile::TempDir, Pinned, Weights) {
    slow_with(&[])
}

fn slow_with(first: &[&str]) -> (tempfile::TempDir, Pinned, Weights) {
    let folder = tempfile::tempdir().unwrap();
    let tensor = |n: u32| (format!("{n:02}"), Tensor::full(n, 512 << 10, &Device::Cpu).unwrap());
    let tensors: HashMap<_, _> = (0..16).map(tensor).collect();
    candle_core::safetensors::save(&tensors, folder.path().join("model.safetensors")).unwrap();
    let pinned = pinned(16 << 20);
    let slow = Copier::builder(pinned.pool(), pinned.device()).rate(16 << 20).build().unwrap();
    let pinned = pinned.with_copier(slow);
    let weights = Weights::open_where(&pinned, folder.path(), first, |_| true).unwrap();
    (folder, pinned, weights)
}

/// A file of tensors of the format's types, 16 elements each, whose bytes are their places in the file.
fn typed(types: &[(&str, usize)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let (mut header, mut end) = (serde_json::Map::new(), 0);
    for (dtype, len) in types {
        let tensor = serde_json::json!({"dtype": dtype, "shape": [16], "data_offsets": [end, end + len]});
        header.insert(format!("of.{dtype}"), tensor);
        end += len;
    }
    let header = serde_json::Value::Object(header).to_string();
    let bytes = (0..end).map(|byte| byte as u8);
    let whole = (header.len() as u64)
        .to_le_bytes()
        .into_iter()
        .chain(header.bytes())
        .chain(bytes)
        .collect::<Vec<_>>();
    std::fs::write(folder.path().join("model.safetensors"), whole).unwrap();
    folder
}

fn cut(folder: &Path) {
    let file = OpenOptions::new().write(true).open(&files(folder).unwrap()[0]).unwrap();
    file.set_len(file.metadata().unwrap().len() - 4096).unwrap();
}

#[test]
fn tensors_are_equal() {
    let folder = small();
    let weights = Weights::open(&pinned(16 << 20), folder.path()).unwrap();
    let theirs = candle_core::safetensors::load(&files(folder.path()).unwrap()[0], &Device::Cpu).unwrap();
    assert_eq!(weights.names().count(), theirs.len());
    for (name, tensor) in &theirs {
        let ours = weights.get(name).unwrap();
        assert_eq!((ours.dtype(), ours.shape()), (tensor.dtype(), tensor.shape()), "{name}");
        assert_eq!(bytes(&ours), bytes(tensor), "{name}");
    }
    weights.finish().unwrap();
    assert_eq!(weights.landed(), weights.bytes());
}

#[test]
fn tokens_are_equal() {
    let folder = small();
    let pinned = pinned(16 << 20);
    let weights = Arc::new(Weights::open(&pinned, folder.path()).unwrap());
    let ours = Model::pinpool(&weights, folder.path(), &pinned).unwrap();
    let theirs = Model::candle(folder.path(), &Device::Cpu).unwrap();
    let prompt = encode("pages");
    let tokens = ours.generate(&prompt, 24, |_| true).unwrap();
    assert_eq!(tokens.len(), 24);
    assert_eq!(tokens, theirs.generate(&prompt, 24, |_| true).unwrap());
    assert!(tokens.iter().any(|token| *token != tokens[0]), "the model says one thing only: {tokens:?}");
}

#[test]
fn a_tensor_can_be_had_before_the_others() {
    let (_folder, _, weights) = slow();
    let first = weights.get("00").unwrap();
    assert!(weights.landed() < weights.bytes(), "all have landed");
    assert_eq!(first.max_all().unwrap().to_scalar::<u32>().unwrap(), 0);
    let last = weights.get("15").unwrap();
    assert_eq!(last.min_all().unwrap().to_scalar::<u32>().unwrap(), 15);
    weights.finish().unwrap();
}

#[test]
fn what_is_needed_first_comes_first() {
    let (_folder, _, weights) = slow_with(&["15", "07"]);
    for n in [15, 7] {
        let tensor = weights.get(&format!("{n:02}")).unwrap();
        assert_eq!(tensor.max_all().unwrap().to_scalar::<u32>().unwrap(), n);
    }
    assert!(weights.landed() < weights.bytes(), "all have landed");
    weights.finish().unwrap();
}

#[test]
fn a_missing_tensor_is_named() {
    let folder = small();
    let pinned = pinned(16 << 20);
    let gone = "model.layers.1.mlp.up_proj.weight";
    let weights = Arc::new(Weights::open_where(&pinned, folder.path(), &[], |name| name != gone).unwrap());
    let error = weights.get("no such tensor").unwrap_err().to_string();
    assert!(error.contains("no such tensor"), "{error}");
    let error =
        Model::pinpool(&weights, folder.path(), &pinned).err().expect("a tensor is missing").to_string();
    assert!(error.contains(gone), "{error}");
    let error = weights.var_builder(DType::F32).get((3, 3), "lm_head.weight").unwrap_err().to_string();
    assert!(error.contains("[3, 3]"), "{error}");
}

#[test]
fn a_truncated_file_is_an_error() {
    // Two loads, of which the second has to wait for the first.
    let (slow_folder, pinned, slow) = slow();
    let folder = small();
    let weights = Arc::new(Weights::open(&pinned, folder.path()).unwrap());
    cut(slow_folder.path());
    cut(folder.path());
    // The tensors before the cut arrive all the same.
    slow.get("00").unwrap();
    let error = slow.get("15").unwrap_err().to_string();
    assert!(error.contains("model.safetensors"), "{error}");
    slow.finish().unwrap_err();
    let error = Model::pinpool(&weights, folder.path(), &pinned).err().expect("a tensor failed").to_string();
    assert!(error.contains("model.safetensors"), "{error}");
    // A file that is short before the load does not fit its header.
    let error = Weights::open(&pinned, folder.path()).err().expect("the file is short").to_string();
    assert!(error.contains("model.safetensors"), "{error}");
}

#[test]
fn tensors_go_through_buffers() {
    let pinned = pinned(16 << 20);
    let numbers: Vec<f32> = (0..12).map(|n| n as f32).collect();
    let mut buf = pinned.pool().checkout(48).unwrap();
    for number in &numbers {
        buf.extend_from_slice(&number.to_le_bytes());
    }
    let (tensor, buf) = pinned.upload(buf, DType::F32, &[3, 4]).unwrap();
    assert_eq!(tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap(), numbers);
    // A view with gaps arrives in the order of its elements.
    let back = pinned.download(&tensor.t().unwrap()).unwrap();
    let first: Vec<f32> =
        back[..12].chunks_exact(4).map(|n| f32::from_le_bytes(n.try_into().unwrap())).collect();
    assert_eq!(first, [0.0, 4.0, 8.0]);
    pinned.upload(buf, DType::F32, &[5]).unwrap_err();
}

#[test]
fn tensors_of_8_bits_arrive() {
    let folder = typed(&[("F8_E4M3", 16), ("F8_E8M0", 16), ("BF16", 32)]);
    let weights = Weights::open(&pinned(16 << 20), folder.path()).unwrap();
    let theirs = candle_core::safetensors::load(&files(folder.path()).unwrap()[0], &Device::Cpu).unwrap();
    let (ours, theirs) = (weights.get("of.F8_E4M3").unwrap(), &theirs["of.F8_E4M3"]);
    assert_eq!((ours.dtype(), ours.shape()), (DType::F8E4M3, theirs.shape()));
    assert_eq!(bytes(&ours), (0..16).collect::<Vec<u8>>());
    // 2^-9 is the smallest number of that type but zero; casts run on the device.
    let numbers = |tensor: &Tensor| tensor.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap();
    assert_eq!(numbers(&ours), numbers(theirs));
    assert_eq!(numbers(&ours)[..2], [0.0, 0.001953125]);
    // Candle keeps these, and says no more of them than their type.
    assert_eq!(weights.get("of.F8_E8M0").unwrap().dtype(), DType::F8E8M0);
    weights.finish().unwrap();
}

#[test]
fn a_type_that_candle_lacks_is_named() {
    let folder = typed(&[("BF16", 32), ("F8_E5M2", 16)]);
    let pinned = pinned(16 << 20);
    let error = Weights::open(&pinned, folder.path()).err().expect("there is no such type").to_string();
    assert!(["of.F8_E5M2", "convert", "open_where"].iter().all(|what| error.contains(what)), "{error}");
    let weights = Weights::open_where(&pinned, folder.path(), &[], |name| !name.contains("F8_E5M2")).unwrap();
    assert_eq!(weights.get("of.BF16").unwrap().dtype(), DType::BF16);
    weights.finish().unwrap();
}
