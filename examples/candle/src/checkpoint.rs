//! Checkpoints of Llama's shapes with random weights: a small one, and one of Llama 3.1 8B's sizes.
//!
//! The weights follow from a seed. Each is a bf16 number between 0.0078 and 0.125 or its negative, so that the numbers
//! of a forward pass neither vanish nor overflow. Threads write one shard each, at some gigabytes a second.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

/// Bytes that are made and written at a time.
const BLOCK: usize = 4 << 20;

/// What a checkpoint is like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// Two layers, 0.2 MB, one file.
    Small,
    /// Llama 3.1 8B: 32 layers, 16 GB, four files.
    Eight,
}

struct Shapes {
    hidden: usize,
    intermediate: usize,
    vocab: usize,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    positions: usize,
    theta: f64,
    files: usize,
}

impl Size {
    fn shapes(self) -> Shapes {
        match self {
            Self::Small => Shapes {
                hidden: 64,
                intermediate: 160,
                vocab: 320,
                layers: 2,
                heads: 4,
                kv_heads: 2,
                positions: 512,
                theta: 10_000.0,
                files: 1,
            },
            Self::Eight => Shapes {
                hidden: 4096,
                intermediate: 14336,
                vocab: 128_256,
                layers: 32,
                heads: 32,
                kv_heads: 8,
                positions: 8192,
                theta: 500_000.0,
                files: 4,
            },
        }
    }
}

/// The names and shapes of all tensors, in the order of the files.
fn tensors(of: &Shapes) -> Vec<(String, Vec<usize>)> {
    let kv = of.hidden / of.heads * of.kv_heads;
    let mut all = vec![("model.embed_tokens.weight".to_owned(), vec![of.vocab, of.hidden])];
    for layer in 0..of.layers {
        for (name, shape) in [
            ("self_attn.q_proj", vec![of.hidden, of.hidden]),
            ("self_attn.k_proj", vec![kv, of.hidden]),
            ("self_attn.v_proj", vec![kv, of.hidden]),
            ("self_attn.o_proj", vec![of.hidden, of.hidden]),
            ("mlp.gate_proj", vec![of.intermediate, of.hidden]),
            ("mlp.up_proj", vec![of.intermediate, of.hidden]),
            ("mlp.down_proj", vec![of.hidden, of.intermediate]),
            ("input_layernorm", vec![of.hidden]),
            ("post_attention_layernorm", vec![of.hidden]),
        ] {
            all.push((format!("model.layers.{layer}.{name}.weight"), shape));
        }
    }
    all.push(("model.norm.weight".to_owned(), vec![of.hidden]));
    all.push(("lm_head.weight".to_owned(), vec![of.vocab, of.hidden]));
    all
}

/// Writes config.json, the files and their index into a folder, which is made if it is not there.
pub fn write(size: Size, seed: u64, folder: &Path) -> io::Result<()> {
    let of = size.shapes();
    fs::create_dir_all(folder)?;
    let config = serde_json::json!({
        "hidden_size": of.hidden, "intermediate_size": of.intermediate, "vocab_size": of.vocab,
        "num_hidden_layers": of.layers, "num_attention_heads": of.heads, "num_key_value_heads": of.kv_heads,
        "rms_norm_eps": 1e-5, "rope_theta": of.theta, "max_position_embeddings": of.positions,
        "tie_word_embeddings": false, "torch_dtype": "bfloat16",
    });
    fs::write(folder.join("config.json"), format!("{config:#}\n"))?;

    let all = tensors(&of);
    let total: usize = all.iter().map(|(_, shape)| bytes(shape)).sum();
    let mut parts = vec![Vec::new(); of.files];
    let mut before = 0;
    for (at, tensor) in all.iter().enumerate() {
        parts[(before * of.files / total).min(of.files - 1)].push((at, tensor));
        before += bytes(&tensor.1);
    }
    let name = |part: usize| match of.files {
        1 => "model.safetensors".to_owned(),
        files => format!("model-{:05}-of-{files:05}.safetensors", part + 1),
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = parts
            .iter()
            .enumerate()
            .map(|(part, tensors)| {
                let path = folder.join(name(part));
                scope.spawn(move || write_file(&path, tensors, seed))
            })
            .collect();
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().map_err(|_| io::Error::other("a writer panicked"))?)
    })?;
    if of.files > 1 {
        let map: serde_json::Map<_, _> = parts
            .iter()
            .enumerate()
            .flat_map(|(part, tensors)| {
                tensors.iter().map(move |(_, (tensor, _))| (tensor.clone(), name(part).into()))
            })
            .collect();
        let index = serde_json::json!({"metadata": {"total_size": total}, "weight_map": map});
        fs::write(folder.join("model.safetensors.index.json"), format!("{index:#}\n"))?;
    }
    Ok(())
}

fn bytes(shape: &[usize]) -> usize {
    2 * shape.iter().product::<usize>()
}

fn write_file(path: &Path, tensors: &[(usize, &(String, Vec<usize>))], seed: u64) -> io::Result<()> {
    let (mut header, mut end) = (serde_json::Map::new(), 0);
    for (_, (name, shape)) in tensors {
        let start = end;
        end += bytes(shape);
        let entry = serde_json::json!({"dtype": "BF16", "shape": shape, "data_offsets": [start, end]});
        header.insert(name.clone(), entry);
    }
    let mut header = serde_json::Value::Object(header).to_string();
    // The format's own crate pads the header, so that the tensors are aligned.
    header.push_str(&" ".repeat(header.len().next_multiple_of(64) - header.len() + 56));
    let mut file = File::create(path)?;
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(header.as_bytes())?;
    let mut block = vec![0_u8; BLOCK];
    for (at, (_, shape)) in tensors {
        let mut state = (seed ^ (*at as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15)).max(1);
        let mut left = bytes(shape);
        while left > 0 {
            let n = left.min(BLOCK);
            for word in block[..n.next_multiple_of(8)].chunks_exact_mut(8) {
                // xorshift64, of which each 16 bits keep the sign, two bits of the exponent, and the mantissa.
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                word.copy_from_slice(
                    &((state & 0x81FF_81FF_81FF_81FF) | 0x3C00_3C00_3C00_3C00).to_le_bytes(),
                );
            }
            file.write_all(&block[..n])?;
            left -= n;
        }
    }
    file.flush()
}
