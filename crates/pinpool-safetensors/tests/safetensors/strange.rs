//! Names of any characters: exact where a program asks for them, escaped and short in messages.

use pinpool::{DeviceError, Error, ErrorClass};
use pinpool_safetensors::Checkpoint;

use super::{Folder, with_header};

/// What steers a terminal, forges a line, turns text around or does not show, as JSON has it and as it is.
const STRANGE: [(&str, &str); 6] = [
    ("\\u001b[2J", "\u{1b}[2J"),
    ("a\\nERROR forged", "a\nERROR forged"),
    ("\u{9b}31m", "\u{9b}31m"),
    ("\u{202e}txt.exe", "\u{202e}txt.exe"),
    ("z\u{200b}\u{feff}z", "z\u{200b}\u{feff}z"),
    ("\\r\\t\\u0000\u{7f}", "\r\t\0\u{7f}"),
];

#[test]
fn names_come_out_exactly_as_the_file_has_them() {
    for (json, name) in STRANGE {
        let header = format!(
            r#"{{"__metadata__":{{"{json}":"v{json}"}},"{json}":{{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}}}"#
        );
        let folder = Folder::new();
        let read = Checkpoint::open(folder.put("a.safetensors", with_header(&header, [0]))).unwrap();
        assert!(read.get(name).is_some_and(|tensor| tensor.name() == name));
        let metadata: serde_json::Value = serde_json::from_str(read.metadata().next().unwrap()).unwrap();
        assert_eq!(metadata, serde_json::json!({ name: format!("v{name}") }));
        // The same by an index, which writes it in another way.
        let other: String = name.encode_utf16().map(|unit| format!("\\u{unit:04X}")).collect();
        let index = format!(r#"{{"weight_map":{{"{other}":"\u0061.safetensors"}}}}"#);
        let read = Checkpoint::open(folder.put("model.safetensors.index.json", index)).unwrap();
        assert_eq!(read.tensors().map(|tensor| tensor.name().to_owned()).collect::<Vec<_>>(), [name]);
    }
}

/// The fields have the exact name; the message has it escaped, in every variant that has a text.
#[test]
fn every_error_shows_what_others_said_in_plain_characters() {
    let evil = || format!("\u{1b}[31m\n\u{202e}{}", "\u{9b}".repeat(1 << 20));
    let (class, kind, offset) = (ErrorClass::Argument, std::io::ErrorKind::Other, 0);
    let device = DeviceError { device: evil().into(), call: "call", code: 1, text: evil().into(), class };
    let lost = Box::new(Error::Device(device.clone()));
    for error in [
        Error::Argument(evil()),
        Error::Unavailable { device: evil(), why: evil() },
        Error::Unsupported(evil()),
        Error::MemLock { wanted: 1, limit: evil() },
        Error::OutOfMemory { wanted: 1, text: evil() },
        Error::Mismatch { what: "a stream", of: evil(), with: evil(), remedy: "" },
        Error::Read { what: evil(), offset, kind, text: evil() },
        Error::Write { what: evil(), offset, kind, text: evil() },
        Error::Malformed { what: evil(), tensor: Some(evil().into()), why: evil() },
        Error::Transfer { what: evil(), offset, cause: lost.clone() },
        Error::Tensor { tensor: evil().into(), landed: 1, total: 2, cause: lost },
        Error::Cancelled { what: evil(), done: 1, total: 2 },
        Error::Device(device),
    ] {
        for text in [error.to_string(), std::io::Error::from(error).to_string()] {
            let bad = |c: char| c.is_control() || c == '\u{202e}';
            assert!(!text.contains(bad) && text.len() < 20_000, "{:?}", &text[..200]);
        }
    }
}
