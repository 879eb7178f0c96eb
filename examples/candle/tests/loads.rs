//! Both loaders give the same tensors and the same tokens, a tensor can be had before the others, and errors come out
//! as errors.

use std::fs::{self, OpenOptions};
use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use pinpool_candle::checkpoint::{Size, write};
use pinpool_candle::model::{Model, encode, files};
use pinpool_candle::{Pinned, Weights};

const FIRST: &str = "model.embed_tokens.weight";
const LAST: &str = "lm_head.weight";

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

/// A load that takes seconds, unless the limit is taken back.
fn slow(folder: &Path) -> (Pinned, Weights) {
    let pinned = pinned(256 << 10);
    pinned.copier().set_rate(Some(100_000));
    let weights = Weights::open(&pinned, folder).unwrap();
    (pinned, weights)
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
    let folder = small();
    let (pinned, weights) = slow(folder.path());
    let first = weights.get(FIRST).unwrap();
    assert!(weights.landed() < weights.bytes(), "all have landed");
    assert_eq!(first.dims(), [320, 64]);
    pinned.copier().set_rate(None);
    weights.get(LAST).unwrap();
    weights.finish().unwrap();
}

#[test]
fn a_missing_tensor_is_named() {
    let folder = small();
    let pinned = pinned(16 << 20);
    let gone = "model.layers.1.mlp.up_proj.weight";
    let weights = Arc::new(Weights::open_where(&pinned, folder.path(), |name| name != gone).unwrap());
    let error = weights.get("no such tensor").unwrap_err().to_string();
    assert!(error.contains("no such tensor"), "{error}");
    let error =
        Model::pinpool(&weights, folder.path(), &pinned).err().expect("a tensor is missing").to_string();
    assert!(error.contains(gone), "{error}");
    let error = weights.var_builder(DType::F32).get((3, 3), FIRST).unwrap_err().to_string();
    assert!(error.contains("[3, 3]"), "{error}");
}

#[test]
fn a_truncated_file_is_an_error() {
    let folder = small();
    let path = files(folder.path()).unwrap().remove(0);
    let cut = |len| OpenOptions::new().write(true).open(&path).unwrap().set_len(len).unwrap();
    let len = fs::metadata(&path).unwrap().len();
    // While it is loaded: the last tensor does not come, and says why.
    let (pinned, weights) = slow(folder.path());
    cut(len - 4096);
    pinned.copier().set_rate(None);
    let error = weights.get(LAST).unwrap_err().to_string();
    assert!(error.contains("model.safetensors"), "{error}");
    weights.finish().unwrap_err();
    let weights = Arc::new(weights);
    let error = Model::pinpool(&weights, folder.path(), &pinned).err().expect("a tensor failed").to_string();
    assert!(error.contains("model.safetensors"), "{error}");
    // Before: the header does not fit.
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
