//! Candle's Llama with greedy decoding, by either loader, and a tokenizer of bytes.
//!
//! The weights are random, so a vocabulary would say nothing: a token below 256 is a byte, and others are shown by
//! number.

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::{D, DType, Device, IndexOp, Result, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::llama::{Cache, Config, Llama, LlamaConfig};

use crate::{Pinned, Weights};

/// Which code moves the weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loader {
    /// Candle's own: `VarBuilder::from_mmaped_safetensors`.
    Candle,
    /// [`Weights`].
    Pinpool,
}

/// A model that is there.
pub struct Model {
    llama: Llama,
    config: Config,
    device: Device,
    dtype: DType,
}

/// The tokens of a text.
pub fn encode(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

/// A token as text.
pub fn decode(token: u32) -> String {
    match u8::try_from(token) {
        Ok(byte) => byte.escape_ascii().to_string(),
        Err(_) => format!("<{token}>"),
    }
}

/// The type in which models of this package compute on a device. Candle's CPU device multiplies no bf16.
pub fn dtype(device: &Device) -> DType {
    if device.is_cpu() { DType::F32 } else { DType::BF16 }
}

/// `config.json` of a folder.
pub fn config(folder: &Path) -> Result<Config> {
    let text = fs::read(folder.join("config.json"))?;
    let config: LlamaConfig = serde_json::from_slice(&text).map_err(candle_core::Error::wrap)?;
    Ok(config.into_config(false))
}

/// The safetensors files of a folder, by name.
pub fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder)?.collect::<std::io::Result<Vec<_>>>()?;
    let mut files: Vec<_> = entries.into_iter().map(|entry| entry.path()).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "safetensors"));
    files.sort();
    Ok(files)
}

impl Model {
    /// A model by candle's own loader.
    pub fn candle(folder: &Path, device: &Device) -> Result<Self> {
        let files = files(folder)?;
        // SAFETY: the files are not written to while they are mapped: they are this program's own.
        #[allow(unsafe_code)]
        let builder = unsafe { VarBuilder::from_mmaped_safetensors(&files, dtype(device), device) }?;
        Self::build(builder, config(folder)?, device)
    }

    /// A model of weights that are on their way: each tensor is taken when it has arrived.
    pub fn pinpool(weights: &Arc<Weights>, folder: &Path, pinned: &Pinned) -> Result<Self> {
        let device = pinned.candle();
        let model = Self::build(weights.var_builder(dtype(device)), config(folder)?, device)?;
        weights.finish()?;
        Ok(model)
    }

    /// Candle's Llama unwraps the error of a layer, so the names are looked up first.
    fn build(builder: VarBuilder, config: Config, device: &Device) -> Result<Self> {
        for layer in 0..config.num_hidden_layers {
            for name in [
                "self_attn.q_proj",
                "self_attn.k_proj",
                "self_attn.v_proj",
                "self_attn.o_proj",
                "mlp.gate_proj",
                "mlp.up_proj",
                "mlp.down_proj",
                "input_layernorm",
                "post_attention_layernorm",
            ] {
                let path = format!("model.layers.{layer}.{name}.weight");
                if !builder.contains_tensor(&path) {
                    return Err(candle_core::Error::CannotFindTensor { path }.bt());
                }
            }
        }
        // A layer whose load fails later, of a file that became shorter, ends in that same unwrap.
        let loaded = catch_unwind(AssertUnwindSafe(|| Llama::load(builder, &config)));
        let llama = match loaded {
            Ok(llama) => llama?,
            Err(panic) => match panic.downcast_ref::<String>() {
                Some(why) => candle_core::bail!("{why}"),
                None => candle_core::bail!("the model's load panicked"),
            },
        };
        Ok(Self { llama, config, device: device.clone(), dtype: dtype(device) })
    }

    /// Runs each kernel of a forward pass once, on zeros of the model's widths but with one layer: CUDA loads and
    /// compiles a kernel when it is first used. It needs no weights, so it runs while they are on their way.
    pub fn warm(config: &Config, device: &Device) -> Result<()> {
        let mut config = config.clone();
        (config.num_hidden_layers, config.vocab_size) = (1, config.vocab_size.min(1024));
        config.max_position_embeddings = config.max_position_embeddings.min(64);
        let builder = VarBuilder::zeros(dtype(device), device);
        let model = Self {
            llama: Llama::load(builder, &config)?,
            config,
            device: device.clone(),
            dtype: dtype(device),
        };
        model.generate(&[1; 8], 2, |_| true)?;
        device.synchronize()
    }

    /// The most likely tokens after the prompt, one after the other, until `each` says no or the positions end.
    pub fn generate(
        &self,
        prompt: &[u32],
        tokens: usize,
        mut each: impl FnMut(u32) -> bool,
    ) -> Result<Vec<u32>> {
        if prompt.is_empty() {
            candle_core::bail!("a prompt has a byte at least");
        }
        let mut cache = Cache::new(true, self.dtype, &self.config, &self.device)?;
        let (mut input, mut at, mut out) = (prompt.to_vec(), 0, Vec::new());
        while out.len() < tokens && at + input.len() <= self.config.max_position_embeddings {
            let batch = Tensor::new(input.as_slice(), &self.device)?.unsqueeze(0)?;
            let logits = self.llama.forward(&batch, at, &mut cache)?;
            let token = logits.i(0)?.argmax(D::Minus1)?.to_scalar::<u32>()?;
            at += input.len();
            input = vec![token];
            out.push(token);
            if !each(token) {
                break;
            }
        }
        Ok(out)
    }

    /// The number of tokens that the model knows.
    pub fn vocabulary(&self) -> usize {
        self.config.vocab_size
    }
}
