//! What a cubin says about its own kernels: the parameter list, launch bounds and cluster that the compiler recorded.
//!
//! A cubin is an ELF file. Section `.nv.info.<kernel>` is a list of attributes, each a format byte, an attribute byte
//! and 16 bits that are either the value or the size of a payload that follows.

use std::collections::BTreeMap;

use object::read::elf::ElfFile64;
use object::{Object, ObjectSection, ObjectSymbol};

use crate::{DriverError, Result};

const FORMAT_SIZED: u8 = 0x04;
const ATTR_MAX_THREADS: u8 = 0x05;
const ATTR_REQUIRED_THREADS: u8 = 0x10;
const ATTR_PARAMETER: u8 = 0x17;
const ATTR_REGISTERS: u8 = 0x2f;
const ATTR_CLUSTER: u8 = 0x3d;

/// One parameter, as the cubin records it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CubinParameter {
    /// Position in the parameter area, in bytes.
    pub offset: u32,
    /// Size in bytes.
    pub bytes: u32,
}

/// One kernel of a cubin.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CubinKernel {
    /// Parameters in order.
    pub parameters: Vec<CubinParameter>,
    /// Threads of a block by `__launch_bounds__` or `reqntid`.
    pub threads: Option<[u32; 3]>,
    /// Compiled-in cluster.
    pub cluster: Option<[u32; 3]>,
    /// Registers per thread at launch.
    pub registers: u32,
    /// Size of the machine code in bytes.
    pub code_bytes: u32,
}

/// A parsed cubin.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cubin {
    /// Kernels by symbol.
    pub kernels: BTreeMap<String, CubinKernel>,
    /// 32-bit values of the module's `__constant__` variables that are 4 bytes wide.
    pub constants: BTreeMap<String, u32>,
}

struct Attribute<'a> {
    id: u8,
    payload: &'a [u8],
}

fn attributes(mut data: &[u8]) -> Result<Vec<Attribute<'_>>> {
    let mut out = Vec::new();
    while let [format, id, lo, hi, rest @ ..] = data {
        if *format == FORMAT_SIZED {
            let size = usize::from(u16::from_le_bytes([*lo, *hi]));
            let payload = rest.get(..size).ok_or_else(|| bad(format!("attribute {id:#x} ends early")))?;
            out.push(Attribute { id: *id, payload });
            data = &rest[size..];
        } else {
            data = rest;
        }
    }
    if data.is_empty() { Ok(out) } else { Err(bad(format!("{} bytes after the last attribute", data.len()))) }
}

fn bad(why: impl std::fmt::Display) -> DriverError {
    DriverError::Bundle(format!("cubin: {why}"))
}

fn word(payload: &[u8], index: usize) -> Result<u32> {
    payload
        .get(4 * index..4 * index + 4)
        .map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
        .ok_or_else(|| bad(format!("an attribute of {} bytes lacks word {index}", payload.len())))
}

/// Reads a cubin's own description of its kernels.
pub fn parse(cubin: &[u8]) -> Result<Cubin> {
    let elf: ElfFile64 = ElfFile64::parse(cubin).map_err(bad)?;
    let mut out = Cubin::default();
    for section in elf.sections() {
        let name = section.name().map_err(bad)?;
        let Some(kernel) = name.strip_prefix(".nv.info.") else { continue };
        let mut found = CubinKernel::default();
        let mut parameters = BTreeMap::new();
        for a in attributes(section.data().map_err(bad)?)? {
            let triple = || Ok::<_, DriverError>([word(a.payload, 0)?, word(a.payload, 1)?, word(a.payload, 2)?]);
            match a.id {
                ATTR_PARAMETER => {
                    // Index, then ordinal and offset (16 bits each), then flags with the size in the top 14 bits.
                    let place = word(a.payload, 1)?;
                    let (ordinal, offset) = (place & 0xffff, place >> 16);
                    parameters.insert(ordinal, CubinParameter { offset, bytes: word(a.payload, 2)? >> 18 });
                }
                ATTR_MAX_THREADS | ATTR_REQUIRED_THREADS => found.threads = Some(triple()?),
                ATTR_CLUSTER => found.cluster = Some(triple()?),
                _ => {}
            }
        }
        if let Some((i, _)) = parameters.keys().enumerate().find(|(i, o)| *i as u64 != u64::from(**o)) {
            return Err(bad(format!("kernel '{kernel}' lacks parameter {i}")));
        }
        found.parameters = parameters.into_values().collect();
        if let Some(text) = elf.section_by_name(&format!(".text.{kernel}")) {
            found.code_bytes = u32::try_from(text.size()).map_err(bad)?;
        }
        out.kernels.insert(kernel.to_owned(), found);
    }
    if let Some(info) = elf.section_by_name(".nv.info") {
        for a in attributes(info.data().map_err(bad)?)?.iter().filter(|a| a.id == ATTR_REGISTERS) {
            let index = object::SymbolIndex(word(a.payload, 0)? as usize);
            let symbol = elf.symbol_by_index(index).map_err(bad)?;
            if let Some(k) = out.kernels.get_mut(symbol.name().map_err(bad)?) {
                k.registers = word(a.payload, 1)?;
            }
        }
    }
    if let Some(bank) = elf.section_by_name(".nv.constant3") {
        let data = bank.data().map_err(bad)?;
        for s in elf.symbols().filter(|s| s.section_index() == Some(bank.index()) && s.size() == 4) {
            let at = usize::try_from(s.address()).map_err(bad)?;
            if let Some(b) = data.get(at..at.saturating_add(4)) {
                out.constants.insert(s.name().map_err(bad)?.to_owned(), u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
            }
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attribute_list_of_a_real_kernel() {
        // `.nv.info.kern` of a kernel (CUtensorMap, 40-byte struct, pointer, int) with cluster 2 and 384 threads.
        let words: [u32; 39] = [
            0x0000_3704,
            0x82,
            0x000c_1704,
            0,
            0x0120_0003,
            0x0011_f000,
            0x000c_1704,
            0,
            0x0118_0002,
            0x0021_f000,
            0x000c_1704,
            0,
            0x00f0_0001,
            0x00a1_f000,
            0x000c_1704,
            0,
            0x0070_0000,
            0x0201_f000,
            0x0000_3e01,
            0x000c_3d04,
            2,
            1,
            1,
            0x0000_5003,
            0x00a8_1b03,
            0x0001_4c02,
            0x0101_5f03,
            0x0004_1c04,
            0x210,
            0x000c_0504,
            0x180,
            1,
            1,
            0x0124_1903,
            0x0008_0a04,
            0xd,
            0x0124_0210,
            0x0004_3604,
            8,
        ];
        let mut bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        bytes[2] = 4;
        let list = attributes(&bytes).unwrap();
        let parameters: Vec<_> = list
            .iter()
            .filter(|a| a.id == ATTR_PARAMETER)
            .map(|a| {
                (
                    word(a.payload, 1).unwrap() & 0xffff,
                    word(a.payload, 1).unwrap() >> 16,
                    word(a.payload, 2).unwrap() >> 18,
                )
            })
            .collect();
        assert_eq!(parameters, [(3, 0x120, 4), (2, 0x118, 8), (1, 0xf0, 40), (0, 0x70, 128)]);
        let cluster = list.iter().find(|a| a.id == ATTR_CLUSTER).unwrap();
        assert_eq!(word(cluster.payload, 0).unwrap(), 2);
        let threads = list.iter().find(|a| a.id == ATTR_MAX_THREADS).unwrap();
        assert_eq!(word(threads.payload, 0).unwrap(), 384);
    }

    #[test]
    fn damaged_input_is_an_error() {
        assert!(attributes(&[4, 0x17, 12, 0, 1, 2]).err().unwrap().to_string().contains("0x17 ends early"));
        assert!(attributes(&[3, 1, 0, 0, 9]).err().unwrap().to_string().contains("1 bytes after"));
        assert!(parse(b"not an ELF file").unwrap_err().to_string().starts_with("kernel bundle: cubin:"));
    }
}
