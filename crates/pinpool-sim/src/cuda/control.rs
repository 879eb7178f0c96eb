//! What tests ask of this driver beside its own calls, and what its report says.

use std::fmt::Write;
use std::time::Duration;

use super::world::World;

impl World {
    /// Answers a command of a test: words with spaces between them. Those that any vendor's world has are in
    /// `common.rs`.
    ///
    /// # Panics
    /// There is no such command.
    pub fn command(&mut self, text: &str) -> String {
        let words: Vec<&str> = text.split(' ').collect();
        if let Some(answer) = self.common.command(&words) {
            return answer;
        }
        if let Some(rest) = text.strip_prefix("setup ") {
            let answer = self.command(rest);
            self.setup.push(rest.to_owned());
            return answer;
        }
        let number = |word: &str| word.parse::<u64>().unwrap_or_else(|_| panic!("{text}: a number"));
        match words[..] {
            // Everything as when the world was made; handles from before name nothing any more.
            ["reset"] => self.reset(),
            // The driver is not initialised.
            ["bare"] => self.ready = false,
            ["report"] => return self.report(),
            // So many devices with so many bytes of memory each.
            ["devices", count, memory] => self.have_devices(number(count) as usize, number(memory) as usize),
            ["node", device, node] => {
                self.devices[number(device) as usize].numa_node = node.parse().unwrap_or(-1);
            }
            // Another version of the driver, as `cuDriverGetVersion` counts.
            ["version", version] => self.version = number(version) as i32,
            // The next registration takes that many milliseconds beside its pages.
            ["first-pin", milliseconds] => self.first_pin = Duration::from_millis(number(milliseconds)),
            // Kills the primary context of a device with that code.
            ["kill", device, code] => {
                if let Some((context, _)) = self.devices.get(number(device) as usize).and_then(|d| d.primary)
                {
                    self.kill(context, number(code) as u32);
                }
            }
            // Gives the devices another value of an attribute.
            ["attribute", attribute, value] => {
                self.hosts.set_attribute(number(attribute) as i32, value.parse().unwrap_or(0));
            }
            ["malloc", device, len] => {
                return self.device_malloc(number(device) as usize, number(len) as usize).to_string();
            }
            ["memory", device, kind, len] => {
                let (device, kind, len) =
                    (number(device) as usize, number(kind) as u32, number(len) as usize);
                return self.other_memory(device, kind, len).to_string();
            }
            _ => panic!("no command: {text}"),
        }
        String::new()
    }

    /// One line each: `violation ID text`, `leak what count` (what is there, and what contexts had left when they were
    /// destroyed), `note what count`, `call name count`, `flags name flags count` (how often a call was made with these
    /// flags); and `over` when every context that was retained was released, or was to be.
    pub fn report(&self) -> String {
        let retained: usize = self.devices.iter().filter_map(|d| d.primary).map(|(_, count)| count).sum();
        let more = [
            ("registrations", self.registered.len()),
            ("graphs", self.graphs.count()),
            ("objects", self.graphs.objects()),
        ];
        let there = [("contexts", retained)].into_iter().chain(self.owned(None)).chain(more);
        // Counts though the call may have failed: releasing is the last call that a program makes.
        let over = self.made("cuDevicePrimaryCtxRelease_v2") >= self.retains;
        let mut all = self.common.report(there, over);
        for ((name, flags), count) in &self.hosts.flags {
            let _ = writeln!(all, "flags {name} {flags} {count}");
        }
        all
    }
}
