//! `pinpool load` of safetensors files, good ones and others.

use std::fs;

use super::{Files, fails, limit, load, refuses, squeeze, stdout, verifies};

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
    let first = files.path("model-1.safetensors");
    let second = files.path("model-2.safetensors");
    fs::write(&first, checkpoint(&lens)).unwrap();
    fs::write(&second, checkpoint(&[0])).unwrap();
    let bytes: usize = lens.iter().sum();
    let report = verifies(load([&first, &second]).args(["--chunk", "64KiB"]), 4 << 20, bytes);
    assert!(report["upload_gb_per_s"].as_f64().unwrap() > 0.0);
    assert!(report["download_gb_per_s"].as_f64().unwrap() > 0.0);

    let output = load([&first]).args(["--verify", "--capacity", "8MiB"]).output().unwrap();
    let text = stdout(&output);
    assert!(text.contains("model-1.safetensors: 7 tensors, 393.3 KiB to host:0 in "), "{text}");
    assert!(text.contains("all checksums equal"), "{text}");

    // By an index, of which one tensor is wanted.
    let index = files.path("model.safetensors.index.json");
    fs::write(&index, r#"{"weight_map":{"t.3":"model-1.safetensors"}}"#).unwrap();
    verifies(&mut load([&index]), 8 << 20, 16_384);
    // By its folder: the index that is there, and without it all files.
    verifies(&mut load([files.0.path()]), 8 << 20, 16_384);
    fs::remove_file(&index).unwrap();
    fs::write(&second, checkpoint(&[])).unwrap();
    verifies(&mut load([files.0.path()]), 8 << 20, bytes);
    // What is wrong with it is told as for the files.
    std::os::unix::fs::symlink(files.path("gone"), &index).unwrap();
    refuses(&mut load([files.0.path()]), "model.safetensors.index.json");
}

/// Other JSON files are bytes, as `pinpool load FOLDER/*` names them.
#[test]
fn json_that_is_no_index_is_moved_as_it_is() {
    let files = Files::new();
    let config = files.path("config.json");
    fs::write(&config, r#"{"model_type":"llama"}"#).unwrap();
    verifies(&mut load([&config]), 8 << 20, 22);
}

/// The bytes of the index itself are nothing to load.
#[test]
fn an_index_under_any_name_loads_what_it_names() {
    for name in
        ["model.safetensors.index.fp16.json", "diffusion_pytorch_model.safetensors.index.json", "own.json"]
    {
        let files = Files::new();
        fs::write(files.path("1.safetensors"), checkpoint(&[100, 5000])).unwrap();
        let index = files.path(name);
        fs::write(&index, r#"{"weight_map":{"t.1":"1.safetensors"}}"#).unwrap();
        verifies(&mut load([&index]), 8 << 20, 5000);
    }
}

#[test]
fn as_many_shards_as_may_be_open_are_loaded_and_checked() {
    let files = Files::new();
    for number in 1..=1433 {
        // Their names differ in the number of the shard.
        let bytes = String::from_utf8(checkpoint(&[70])).unwrap().replace("t.0", &format!("{number:03x}"));
        fs::write(files.path(&format!("model-{number:05}-of-01433.safetensors")), bytes).unwrap();
    }
    let command = &mut load([files.0.path()]);
    verifies(limit(command, libc::RLIMIT_NOFILE, 1600), 8 << 20, 1433 * 70);
    // Where the system opens too few, that is no fault of the command line.
    fails(limit(&mut load([files.0.path()]), libc::RLIMIT_NOFILE, 1024), "ulimit -n");
}

#[test]
fn a_download_that_is_incomplete_is_told() {
    let files = Files::new();
    let link = files.path("2.safetensors");
    std::os::unix::fs::symlink("../blobs/gone", &link).unwrap();
    let index = files.path("model.safetensors.index.json");
    fs::write(&index, r#"{"weight_map":{"t.0":"1.safetensors","t.1":"2.safetensors"}}"#).unwrap();
    for path in [&*link, &*index, files.0.path()] {
        refuses(&mut load([path]), "No such file or directory (os error 2); if the download is incomplete");
    }
}

#[test]
fn checkpoints_that_lie_are_refused_by_tensor() {
    let files = Files::new();
    let path = files.path("lies.safetensors");
    let mut bytes = checkpoint(&[10, 20]);
    bytes.pop();
    fs::write(&path, &bytes).unwrap();
    refuses(&mut load([&path]), "lies.safetensors is refused: tensor \"t.1\" lies at 10..30 of 29 bytes");
    fs::write(&path, [7; 30]).unwrap();
    refuses(&mut load([&path]), "no safetensors file");
    let index = files.path("model.safetensors.index.json");
    fs::write(&index, r#"{"weight_map":{"t":"../lies.safetensors"}}"#).unwrap();
    refuses(&mut load([&index]), "no name of a file beside the index");
}

/// A file of a stranger may be long; what the command keeps of it in memory is not much longer.
#[test]
fn nonsense_of_megabytes_is_refused_in_little_memory() {
    let files = Files::new();
    let long = |front: &str| format!("{front}{}[]]", "[],".repeat(2 << 20));
    let header = files.path("nonsense.safetensors");
    let text = long(r#"{"t":["#) + "}";
    fs::write(&header, [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()).unwrap();
    let index = files.path("nonsense.safetensors.index.json");
    fs::write(&index, long(r#"{"metadata":["#) + r#","weight_map":{}}"#).unwrap();
    // One tensor with three million axes, and one whose name is everything.
    let axes = files.path("axes.safetensors");
    let shape = "1,".repeat(3 << 20);
    let text = format!(r#"{{"t":{{"dtype":"U8","shape":[{shape}1],"data_offsets":[0,2]}}}}"#);
    fs::write(&axes, [&(text.len() as u64).to_le_bytes()[..], text.as_bytes(), &[0; 2]].concat()).unwrap();
    let name = files.path("name.safetensors");
    let text = format!(r#"{{"{}":7}}"#, "n".repeat(6 << 20));
    fs::write(&name, [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()).unwrap();
    for (path, cause) in [
        (&header, "mostly brackets"),
        (&index, "mostly brackets"),
        (&axes, "an object of at most 65535 bytes"),
        (&name, "nnn\" is not described"),
    ] {
        refuses(squeeze(&mut load([path]), 120 << 20), cause);
    }
}
